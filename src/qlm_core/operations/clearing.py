"""Whether the agent would clear its engine for a head of another model: `qlm_core.operations.preemption.clear` in closed form over groups.

Who predicts knows what runs by group and not by request: all of a group count as due at the group's first deadline, as half done, and as
able to go back to the queue, at once. So an eviction is expected less often than agents evict, not more often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qlm_core.operations.preemption import EvictionMethod, eviction_cost_s, swap_back_s
from qlm_core.prediction.prediction_service import Service
from qlm_core.profiles.profile import HardwareProfile


class Runner(Protocol):
    """Requests of one group or class that run: `deadline_s` of the first of them, infinite where their SLO cannot be missed any more."""

    @property
    def band(self) -> int: ...

    @property
    def deadline_s(self) -> float: ...

    @property
    def count(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCosts:
    """Costs of returning a batch to the queue. `eviction_cost_s`: what each request loses; `swap_back_s`: to make their model
    active again; `runs_left_s`: how long each would run on, on average."""

    eviction_cost_s: float
    swap_back_s: float
    runs_left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first group of an order, of another model than the active one. `deadline_s`: infinite for strict priorities; `service_s`: from
    an empty engine to what its SLO bounds, the swap included."""

    band: int
    deadline_s: float
    requests: int
    service_s: float


def eviction_costs(running: Service, prompt_tokens: float, hardware: HardwareProfile) -> EvictionCosts:
    """Costs of evicting running requests with prompts of so many tokens on average. Each has made on average as
    much as it has left (the age of a renewal process)."""
    context_tokens = round(prompt_tokens + running.left_tokens)
    return EvictionCosts(
        eviction_cost_s=eviction_cost_s(EvictionMethod.ABORT, context_tokens, hardware),
        swap_back_s=swap_back_s(hardware),
        runs_left_s=running.left_tokens * running.step_s,
    )


def would_clear(runners: Sequence[Runner], drain_s: float, costs: EvictionCosts, head: Head, now_s: float) -> bool:
    """Whether all runs are evicted for the head, because the head is late if they go on (for `drain_s`) and all of them are less urgent;
    not where as many of them would be late by it as it brings, nor where it is late in any case and they would wait longer for it than it
    for them, over all requests."""
    if not runners:
        return False
    slack_s = head.deadline_s - now_s - head.service_s if head.deadline_s < math.inf else 0.0
    if drain_s <= slack_s:
        return False
    harmed, running = 0, 0
    loses_s = costs.eviction_cost_s + costs.swap_back_s
    for runner in runners:
        if (runner.band, runner.deadline_s) <= (head.band, head.deadline_s):
            return False
        running += runner.count
        if runner.band == head.band and 0.0 <= runner.deadline_s - now_s - costs.runs_left_s < loses_s + head.service_s:
            harmed += runner.count
    worth_it = head.deadline_s >= now_s or head.requests * drain_s > running * (head.service_s + loses_s)
    return worth_it and harmed < head.requests
