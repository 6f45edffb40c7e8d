"""Earliest deadline first, earliest finish: EDF of QLM section 8, on the queue that ends a group first.

Only bands and deadlines count, so models are swapped whenever deadlines alternate (QLM section 2.4, insight 3). Times are sums of means: a
group's work after the swap at its position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestFacts, SloKind
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.baseline import Baseline, Home, Orders, Seating
from qlm_planner.policies.queue_work import QueueWork, Work, Works

_urgency = attrgetter("urgency")


@dataclass(slots=True, kw_only=True)
class DatedQueue:
    """One queue in the order of deadlines. `fixed`: groups at its front that keep their place."""

    work: QueueWork
    groups: list[Group]
    fixed: int = 0

    def place(self, group: Group) -> int:
        """Behind all groups that are at least as urgent; in front of fixed ones only for a higher band."""
        if self.fixed and group.band < self.groups[self.fixed - 1].band:
            return bisect_right(self.groups, group.urgency, hi=self.fixed, key=_urgency)
        return bisect_right(self.groups, group.urgency, lo=self.fixed, key=_urgency)

    def insert(self, place: int, group: Group, work: Work) -> None:
        """Inserts a group. O(groups behind it)."""
        self.fixed += place < self.fixed
        self.groups.insert(place, group)
        self.work.insert(place, work)


def first_end(queues: Sequence[DatedQueue], works: Sequence[Work], group: Group) -> tuple[DatedQueue, int, Work]:
    """The queue that ends a group first in the order of deadlines, its position and its work there. `works`: on each queue."""
    places = [queue.place(group) for queue in queues]
    ends = [queue.work.end_s(place, work) for queue, place, work in zip(queues, places, works, strict=True)]
    best = ends.index(min(ends))
    return queues[best], places[best], works[best]


@dataclass(slots=True, kw_only=True)
class ByDeadline:
    """Seats requests in the order of deadlines."""

    board: Board
    works: Works
    queues: list[DatedQueue]

    @classmethod
    def of(cls, board: Board, works: Works) -> ByDeadline:
        """On all serving instances. O(groups)."""
        queues = [DatedQueue(work=work, groups=board.queue_groups(work.slot.facts.name)) for work in works.queues(board)]
        return cls(board=board, works=works, queues=queues)

    def join(self, facts: RequestFacts, alone: Group) -> Group:
        """The group in front of the position, if it has the request's key and room, else `alone` there."""
        found = self.first_end(alone)
        if found is None:
            self.board.open_group(alone, self.board.place_by_urgency(self.board.queues[UNASSIGNED], alone))
            return alone
        queue, place, work = found
        if place:
            before = queue.groups[place - 1]
            if before.traits.key == alone.traits.key and self._has_room(queue.work.slot, before, facts):
                self.board.add_request(before, facts)
                self._refresh(queue, place - 1)
                return before
        self.open(queue, place, alone, work)
        return alone

    def first_end(self, group: Group) -> tuple[DatedQueue, int, Work] | None:
        """`first_end` on the queues that can serve a group; None without any."""
        able = [queue for queue in self.queues if self.works.table.estimates.can_serve(queue.work.slot, group.traits.key.model)]
        return first_end(able, self.works.on([queue.work.slot for queue in able], [group])[0], group) if able else None

    def open(self, queue: DatedQueue, place: int, group: Group, work: Work) -> None:
        """Opens a new group on the board."""
        group.instance = queue.work.slot.facts.name
        queue.insert(place, group, work)
        self.board.open_group(group, place)

    def count_request(self, group: Group) -> None:
        """Updates the work of a group with one request more."""
        for queue in self.queues:
            if queue.work.slot.facts.name == group.instance:
                self._refresh(queue, queue.groups.index(group))

    def _refresh(self, queue: DatedQueue, place: int) -> None:
        [[work]] = self.works.on([queue.work.slot], [queue.groups[place]])
        queue.work.replace(place, work)

    def _has_room(self, slot: Slot, group: Group, facts: RequestFacts) -> bool:
        estimates = self.works.table.estimates
        limits = estimates.limits_at(slot, group)
        if group.live >= limits.live or group.waiting >= limits.waiting:
            return False
        spread_s = estimates.policy.group_spread_fraction * group.traits.slo_s
        return facts.slo.kind is SloKind.PRIORITY or facts.deadline_s - group.first_deadline_s <= spread_s


def heads_and_rest(board: Board, works: Works) -> tuple[list[DatedQueue], list[Group], set[str]]:
    """The serving instances' queues with only their running heads; all other servable groups, most urgent first; the ids of both."""
    slots, estimates = board.serving, works.table.estimates
    queues: list[DatedQueue] = []
    rest: list[Group] = []
    named: set[str] = set()
    for slot in slots:
        groups = board.queue_groups(slot.facts.name)
        head = [group for group in groups[:1] if slot.running and estimates.can_serve(slot, group.traits.key.model)]
        queue = DatedQueue(work=works.empty(slot), groups=[])
        for group in head:
            queue.insert(0, group, works.on([slot], [group])[0][0])
        queue.fixed = len(head)
        queues.append(queue)
        free = [group for group in groups[len(head) :] if any(estimates.can_serve(each, group.traits.key.model) for each in slots)]
        rest += free
        named.update(group.group_id for group in (*head, *free))
    return queues, sorted(rest, key=_urgency), named


def orders_of(queues: Sequence[DatedQueue], board: Board, named: Collection[str]) -> Orders:
    """The queues as orders; groups that no instance serves keep their place at the end."""
    orders: dict[str, list[str]] = {}
    for queue in queues:
        name = queue.work.slot.facts.name
        rest = [group_id for group_id in board.queues[name] if group_id not in named]
        orders[name] = [group.group_id for group in queue.groups] + rest
    return orders


def by_deadline(board: Board, works: Works) -> Orders:
    """Orders all groups anew, most urgent first, each where it ends first; running heads stay."""
    queues, rest, named = heads_and_rest(board, works)
    for group, [able, on] in zip(rest, able_queues(queues, rest, works), strict=True):
        queue, place, work = first_end(able, on, group)
        queue.insert(place, group, work)
    return orders_of(queues, board, named)


def able_queues(queues: Sequence[DatedQueue], groups: Sequence[Group], works: Works) -> list[tuple[list[DatedQueue], list[Work]]]:
    """For each group, the queues that can serve it, and its work there."""
    if not groups:
        return []
    estimates = works.table.estimates
    able = [[estimates.can_serve(queue.work.slot, group.traits.key.model) for queue in queues] for group in groups]
    on = works.on([queue.work.slot for queue in queues], groups)
    return [(list(compress(queues, which)), list(compress(each, which))) for which, each in zip(able, on, strict=True)]


class Edf(Baseline):
    """Earliest deadline first. Insertion keeps the order; it reorders only while an instance is idle beside one with several groups."""

    by_age = False

    def seating(self, board: Board, table: ClassTable, now_s: float) -> Seating:
        return ByDeadline.of(board, self.works(table))

    def home(self, lines: Sequence[Line], table: ClassTable, group: Group, board: Board, now_s: float) -> Home:
        works = self.works(table)
        queues = [DatedQueue(work=works.stand(line.slot, line.groups), groups=line.groups) for line in lines]
        queue, place, _ = first_end(queues, works.on([line.slot for line in lines], [group])[0], group)
        return lines[queues.index(queue)], place

    def reorder(self, board: Board, table: ClassTable, now_s: float) -> Orders | None:
        slots = board.serving
        idle = any(slot.running == 0 and not board.queues[slot.facts.name] for slot in slots)
        crowded = any(len(board.queues[slot.facts.name]) > 1 for slot in slots)
        return by_deadline(board, self.works(table)) if idle and crowded else None


class EdfFallback(Edf):
    """Replaces an order by cost with one by deadline, while no order meets the SLOs (`planner.overload: edf`)."""

    def reorder(self, board: Board, table: ClassTable, now_s: float) -> Orders | None:
        orders = by_deadline(board, self.works(table))
        changes = any(list(order) != board.queues[name] for name, order in orders.items() if not _sorted(board, name))
        return orders if changes else super().reorder(board, table, now_s)


def _sorted(board: Board, name: str) -> bool:
    """Whether a queue is sorted by deadline behind its head."""
    urgencies = [group.urgency for group in board.queue_groups(name)[1:]]
    return urgencies == sorted(urgencies)
