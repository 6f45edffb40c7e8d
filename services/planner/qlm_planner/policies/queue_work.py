"""Queues with the mean work of their groups, the prediction of the comparison policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.order_cost import MODEL, OWN, SWAP, WORK
from qlm_planner.cost.service_times import ClassTable


class Work(NamedTuple):
    """A group on an instance, in seconds: engine time of all its requests; a request's time from its start to the event that its SLO
    bounds; time to activate its model."""

    work_s: float
    own_s: float
    swap_s: float
    model: float


@dataclass(slots=True, kw_only=True)
class QueueWork:
    """One queue, in seconds from now. `free_s`: the end of running requests, of the model `active`; `ends_s`: of each group."""

    slot: Slot
    active: float
    free_s: float
    works: list[Work] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    @property
    def last_s(self) -> float:
        """The end of all groups."""
        return self.ends_s[-1] if self.ends_s else self.free_s

    def start_s(self, place: int, work: Work) -> float:
        """The start of a group at a position."""
        before = self.works[place - 1].model if place else self.active
        return (self.ends_s[place - 1] if place else self.free_s) + (0.0 if before == work.model else work.swap_s)

    def end_s(self, place: int, work: Work) -> float:
        """Its end."""
        return self.start_s(place, work) + work.work_s + work.own_s

    def insert(self, place: int, work: Work) -> None:
        """Inserts a group. O(groups behind it)."""
        self.works.insert(place, work)
        self.add_up(place)

    def replace(self, place: int, work: Work) -> None:
        """Replaces the work of a group."""
        self.works[place] = work
        self.add_up(place)

    def add_up(self, place: int = 0) -> None:
        del self.ends_s[place:]
        for at in range(place, len(self.works)):
            self.ends_s.append(self.start_s(at, self.works[at]) + self.works[at].work_s)


@dataclass(slots=True, kw_only=True)
class Works:
    """Computes the work of groups, cached until they change."""

    table: ClassTable
    _version: int = -1
    _kept: dict[str, tuple[tuple[object, ...], Work]] = field(default_factory=dict)

    def queues(self, board: Board) -> list[QueueWork]:
        """The queues of serving instances with all groups. O(groups)."""
        return [self.stand(slot, board.queue_groups(slot.facts.name)) for slot in board.serving]

    def empty(self, slot: Slot) -> QueueWork:
        """A queue without groups."""
        engine = self.table.estimates.engine(slot)
        return QueueWork(slot=slot, active=engine.model_code, free_s=engine.lead_s(0.0))

    def on(self, slots: Sequence[Slot], groups: Sequence[Group]) -> list[list[Work]]:
        """Each group on each of the instances, all of which can serve it."""
        count = len(slots)
        columns = self.table.columns(groups).take(np.arange(len(groups)).repeat(count))
        rows = self.table.rows(slots, np.tile(np.arange(count), len(groups)), columns, 0.0, 0.0)
        works = [Work(*each) for each in rows[[WORK, OWN, SWAP, MODEL]].T.tolist()]
        return [works[begin : begin + count] for begin in range(0, len(works), count)]

    def stand(self, slot: Slot, groups: Sequence[Group]) -> QueueWork:
        """A queue with its present groups."""
        if self._version != self.table.estimates.version:
            self._version = self.table.estimates.version
            self._kept.clear()
        facts = (slot.facts.incarnation, slot.warm_models, *slot.batches.values())
        known = [self._kept.get(group.group_id) for group in groups]
        keys = [(*facts, group.waiting, group.waiting_prompt_tokens) for group in groups]
        changed = [at for at, kept in enumerate(known) if kept is None or kept[0] != keys[at]]
        found = self.on([slot], [groups[at] for at in changed]) if changed else []
        for at, [work] in zip(changed, found, strict=True):
            self._kept[groups[at].group_id] = (keys[at], work)
        queue = self.empty(slot)
        queue.works = [self._kept[group.group_id][1] for group in groups]
        queue.add_up()
        if len(self._kept) > 2 * KEPT_MIN + 2 * len(groups):
            self._kept = {group.group_id: self._kept[group.group_id] for group in groups}
        return queue


KEPT_MIN = 10_000
"""Least groups in the cache."""
