"""Whether the agent would clear its engine for a head of another model: `qlm_core.preemption.clear` in closed form over groups.

The planner knows what runs by group and not by request: all of a group count as due at the group's first deadline, as half done, and as
giving way by the dearer way. So it expects an eviction less often than agents evict, not more often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_planner.estimates import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first group of an order, of another model than the active one. `deadline_s`: infinite for strict priorities; `service_s`: from
    an empty engine to what its SLO bounds, the swap included."""

    band: int
    deadline_s: float
    requests: int
    service_s: float


def would_clear(engine: Engine, head: Head, now_s: float) -> bool:
    """All that runs gives way to the head, because the head is late if they go on and all of them are less urgent; not where as many of
    them would be late by it as it brings, nor where it is late in any case and loses the engine less time by waiting."""
    if not engine.runners:
        return False
    slack_s = head.deadline_s - now_s - head.service_s if head.deadline_s < math.inf else 0.0
    if engine.drain_s <= slack_s:
        return False
    harmed, displaced_s = 0, 0.0
    for runner in engine.runners:
        if (runner.band, runner.deadline_s) <= (head.band, head.deadline_s):
            return False
        displaced_s += runner.count * engine.displacement_s
        if runner.band == head.band and 0.0 <= runner.deadline_s - now_s - engine.runs_left_s < engine.displacement_s + head.service_s:
            harmed += runner.count
    worth_it = slack_s >= 0.0 or engine.drain_s > displaced_s
    return worth_it and harmed < head.requests
