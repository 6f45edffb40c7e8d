"""A virtual queue as prediction takes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.request import SloKind


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group as prediction sees it: `waiting` requests that hold `waiting_prompt_tokens` in all. `first_deadline_s`: by the
    queue's clock. `output_tokens_max`: no request of the group makes more. `band`: its priority band, lower is served first; all requests
    with an SLO are in one (0 where nobody configured another). `output_tokens`: expected of a request of it under that limit, where the
    caller knows better than the workload profile."""

    group_id: str
    model: str
    slo_class: str
    token_class: str
    waiting: int
    waiting_prompt_tokens: int
    first_deadline_s: float
    slo_kind: SloKind = SloKind.COMPLETION
    output_tokens_max: float = math.inf
    band: int = 0
    output_tokens: Normal | None = None

    def __post_init__(self) -> None:
        if self.waiting < 0 or self.waiting_prompt_tokens < 0 or math.isnan(self.first_deadline_s) or not self.output_tokens_max >= 1.0:
            raise ValueError(f"group {self.group_id}: counts are >= 0, first_deadline_s is a number, output_tokens_max is >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningView:
    """Requests of one class that an instance runs: `count` of them, which hold `prompt_tokens` in all (None: not known).
    `produced_tokens`: what each has made so far, in any order; () where nobody knows, else one number a request.
    `prefill_left_tokens`: prompt tokens of all of them that are not computed yet. `offloaded_tokens`: KV of those displaced to host
    memory, which return first. `band`, `deadline_s`: of the most urgent of them (infinite where their SLO cannot be missed any more).
    `lookahead`: on an engine that takes more requests than it has seats, so that those without output may wait inside it."""

    slo_class: str
    token_class: str
    count: int
    prompt_tokens: int | None = None
    produced_tokens: tuple[int, ...] = ()
    prefill_left_tokens: int = 0
    offloaded_tokens: int = 0
    output_tokens_max: float = math.inf
    band: int = 0
    deadline_s: float = math.inf
    lookahead: bool = False

    def __post_init__(self) -> None:
        known = len(self.produced_tokens)
        if self.count < 0 or known not in (0, self.count) or min(self.produced_tokens, default=0) < 0:
            raise ValueError(f"running requests: count is >= 0, produced_tokens has none or {self.count} numbers >= 0, got {known}")
        if min(self.prompt_tokens or 0, self.prefill_left_tokens, self.offloaded_tokens) < 0 or math.isnan(self.deadline_s):
            raise ValueError("running requests: tokens are >= 0, a deadline is a number")

    def unstarted(self, prompt_tokens_mean: float) -> float:
        """How many of them wait in the engine for their prefill, by the tokens that are left of prompts of so many."""
        without_output = self.produced_tokens.count(0) if self.produced_tokens else self.count
        if self.lookahead and self.produced_tokens:
            return float(without_output)
        return min(without_output, self.prefill_left_tokens / max(1.0, prompt_tokens_mean))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """One virtual queue: `groups` in the order of service, `running` requests of `active_model` ("" while none is loaded or known), of
    which `runners` hold the classes (those that they leave out count as any of the model).
    `running_output_left`: output tokens that a running request has left, where the caller knows better than the workload profile.
    `warm_models`: weights in host memory besides the active one. `arrivals_per_s`: requests that are expected to arrive at the end of the
    queue; they share the batch with those that wait now and lengthen their decode time, never their wait. `loading_s`: for how long the
    active model has been loaded by now, from host memory where it is in `warm_models`, else from disk; None: it is loaded."""

    instance: InstanceFacts
    active_model: str
    running: int
    groups: tuple[GroupView, ...]
    running_output_left: Normal | None = None
    warm_models: tuple[str, ...] = ()
    runners: tuple[RunningView, ...] = ()
    arrivals_per_s: float = 0.0
    loading_s: float | None = None

    def __post_init__(self) -> None:
        if self.running < 0:
            raise ValueError(f"queue of {self.instance.name}: running is >= 0, got {self.running}")
        if sum(runner.count for runner in self.runners) > self.running:
            raise ValueError(f"queue of {self.instance.name}: {self.running} run, and runners hold more")
        if not 0.0 <= self.arrivals_per_s < math.inf:
            raise ValueError(f"queue of {self.instance.name}: arrivals_per_s is finite and >= 0, got {self.arrivals_per_s}")
        if self.loading_s is not None and not self.loading_s >= 0.0:
            raise ValueError(f"queue of {self.instance.name}: loading_s is >= 0, got {self.loading_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPrediction:
    """When a new request would start and end, in seconds from now, on the instance where it would end first. `prefill_s`: from its start to
    its first token. `own_wait`, `own_completion`: what the formulas gave before calibration, None where that is the same; `wait_p99_s`,
    `completion_p99_s`: the quantiles that were learned then, which are those of the normals elsewhere."""

    instance: str
    wait: Normal
    completion: Normal
    requests_ahead: int
    profile_version: int
    prefill_s: float = 0.0
    own_wait: Normal | None = None
    own_completion: Normal | None = None
    wait_p99_s: float | None = None
    completion_p99_s: float | None = None

    def quantiles_s(self, level: float) -> tuple[float, float]:
        """The same quantile of wait and completion. A normal has a tail below zero, such a time has none; and what was learned of either
        apart from the other leaves nobody ending before the prefill of a start at that quantile is done."""
        wait_s, completion_s = self.wait.quantile(level), self.completion.quantile(level)
        if level == 0.99 and self.wait_p99_s is not None and self.completion_p99_s is not None:
            wait_s, completion_s = self.wait_p99_s, self.completion_p99_s
        wait_s = max(0.0, wait_s)
        return wait_s, max(wait_s + self.prefill_s, completion_s)


def probability_late(completion: Normal, deadline_s: float, now_s: float) -> float:
    """P(late) of something that ends `completion` seconds after now. An infinite deadline is never missed, one that has passed is: the tail
    of a normal below zero is none of a time to come."""
    return 1.0 if deadline_s <= now_s else completion.probability_above(deadline_s - now_s)
