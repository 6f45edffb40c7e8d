"""What stands on the board: groups, and instances with what runs there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qlm_core.instance import InstanceFacts
from qlm_planner.group_meta import GroupOrder, GroupTraits

AGED, USUAL, BEHIND = range(3)
"""Tiers of a band, the first served first: who has waited too long, everybody else, and who has had more than its share."""
TIERS = 3

BATCH_STEP = 1.25
"""Batches whose ratio is below this are taken for the same: agents choose anew ten times a second, and a plan rests on each."""


@dataclass(slots=True, kw_only=True)
class Group:
    """`instance`: the virtual queue that it is on or was on last. It is open, and on that queue, while `waiting` > 0. `first_deadline_s`:
    since it was opened, of those that run or ended too; `next_deadline_s`: of the first that waits and can miss it, infinite where none
    can. `tier`: its place within its band (`qlm_planner.ranks`). `slo_least_s`: of its requests, down to half of that of the first one,
    which its traits tell. `answered`: of those that wait, how many have their first token, which is all that their SLO bounds, and came
    back later."""

    group_id: str
    order: GroupOrder
    traits: GroupTraits
    band: int
    instance: str
    first_deadline_s: float
    next_deadline_s: float
    last_deadline_s: float
    waiting: int = 0
    live: int = 0
    waiting_prompt_tokens: int = 0
    answered: int = 0
    slo_least_s: float = math.inf
    tier: int = USUAL

    def __post_init__(self) -> None:
        self.slo_least_s = min(self.slo_least_s, self.traits.slo_s)

    @property
    def open(self) -> bool:
        return self.waiting > 0

    @property
    def due_share(self) -> float:
        """Of those that wait, the share whose SLO can still be missed."""
        return 1.0 - self.answered / self.waiting if self.answered else 1.0

    @property
    def rank(self) -> int:
        """Lower ranks are served first: the band, and the tier within it."""
        return TIERS * self.band + self.tier

    @property
    def spread_s(self) -> float:
        """Seconds from the deadline of the first that waits to the last; 0 where there is none."""
        return max(0.0, self.last_deadline_s - self.next_deadline_s) if self.next_deadline_s < math.inf else 0.0

    def told_next(self, deadline_s: float) -> None:
        """The queue says when the first that waits is due. Those that are answered came first."""
        self.next_deadline_s = deadline_s
        self.answered = min(self.answered, self.waiting)
        if self.answered:
            left = self.waiting - self.answered
            self.next_deadline_s = deadline_s + self.spread_s * self.answered / (self.waiting - 1) if left else math.inf

    @property
    def urgency(self) -> tuple[int, float, GroupOrder]:
        """Sorts as earliest deadline first inside ranks; the older group first where deadlines are equal."""
        return (self.rank, self.first_deadline_s, self.order)


@dataclass(slots=True, kw_only=True)
class Running:
    """Requests of one group that an instance runs."""

    traits: GroupTraits
    count: int = 0


@dataclass(slots=True, kw_only=True)
class Slot:
    """An instance as the planner sees it. `lost_s`: since when its lease is gone, None while it holds. `running`: requests that it owns,
    of the groups `runners`. `active_model`: reported by its agent, or that of the last group it pulled from; "" where neither is known.
    `batches`: how many requests it runs at once of a model, as its agent reported last, within `BATCH_STEP`."""

    facts: InstanceFacts
    alive: bool = True
    lost_s: float | None = None
    running: int = 0
    runners: dict[str, Running] = field(default_factory=dict)
    active_model: str = ""
    warm_models: tuple[str, ...] = ()
    batches: dict[str, int] = field(default_factory=dict)

    def batch(self, model: str) -> int:
        """Most requests of a model that it runs at once."""
        return min(self.facts.batch_max, self.batches.get(model, self.facts.batch_max))

    def report_batch(self, batch: int) -> None:
        """Its agent says how many requests of the active model it runs at once."""
        known = self.batches.get(self.active_model)
        if batch > 0 and self.active_model and (known is None or not known / BATCH_STEP < batch < known * BATCH_STEP):
            self.batches[self.active_model] = batch

    @property
    def serving(self) -> bool:
        """It may be given groups."""
        return self.alive and not self.facts.draining

    def took(self, group: Group, count: int) -> None:
        """Requests of a group run here now."""
        kept = self.runners.get(group.group_id)
        if kept is None:
            kept = self.runners[group.group_id] = Running(traits=group.traits)
        kept.count += count

    def let_go(self, group_id: str) -> None:
        """One request of a group runs here no more."""
        self.running = max(0, self.running - 1)
        kept = self.runners.get(group_id)
        if kept is not None:
            kept.count -= 1
            if kept.count <= 0:
                del self.runners[group_id]
