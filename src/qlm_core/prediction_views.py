"""What prediction is told of a virtual queue, and what it says of each group."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.distribution import Normal
from qlm_core.instance import InstanceFacts
from qlm_core.request import SloKind


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """What prediction knows of a group: `waiting` requests that hold `waiting_prompt_tokens` in all. Deadlines are those of its first and
    last request in seconds of the queue's clock, `last_deadline_s` None where only the first is known (then it stands for all).
    `output_tokens_max`: no request of the group makes more."""

    group_id: str
    model: str
    slo_class: str
    token_class: str
    waiting: int
    waiting_prompt_tokens: int
    first_deadline_s: float
    last_deadline_s: float | None = None
    slo_kind: SloKind = SloKind.COMPLETION
    output_tokens_max: float = math.inf

    def __post_init__(self) -> None:
        if self.waiting < 0 or self.waiting_prompt_tokens < 0 or math.isnan(self.first_deadline_s) or not self.output_tokens_max >= 1.0:
            raise ValueError(f"group {self.group_id}: counts are >= 0, deadlines are numbers, output_tokens_max is >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """One virtual queue: `groups` in the order of service, `running` requests of `active_model` ("" while none is loaded or known).
    `running_output_left`: output tokens that a running request has left, where the caller knows better than the workload profile.
    `warm_models`: weights in host memory besides the active one."""

    instance: InstanceFacts
    active_model: str
    running: int
    groups: tuple[GroupView, ...]
    running_output_left: Normal | None = None
    warm_models: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.running < 0:
            raise ValueError(f"queue of {self.instance.name}: running is >= 0, got {self.running}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTime:
    """Seconds from now. `wait`, `last_wait`: W, until the prefill of the group's first and last request begins. `prefill_s`: P.
    `decode`, `last_decode`: D of those two. `completion`: C of the whole group, the maximum over its requests (equation 5)."""

    group_id: str
    wait: Normal
    last_wait: Normal
    prefill_s: float
    decode: Normal
    last_decode: Normal
    completion: Normal

    @property
    def first_completion(self) -> Normal:
        """C = W + P + D (equation 1) of the group's first request."""
        return self.wait.shifted(self.prefill_s) + self.decode

    @property
    def last_completion(self) -> Normal:
        """C = W + P + D of the group's last request, which need not end last."""
        return self.last_wait.shifted(self.prefill_s) + self.last_decode
