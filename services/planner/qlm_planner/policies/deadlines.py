"""Earliest deadline first, earliest finish: the order that QLM section 8 calls EDF, on the queue that would end a group first.

Bands, then deadlines, decide alone: nothing waits for others of its model, so models are swapped at every turn of the deadlines (QLM
section 2.4, insight 3). Times are means, added up: a group's work after the swap that its place needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from qlm_core.instance import UNASSIGNED
from qlm_core.request import RequestFacts, SloKind
from qlm_planner.board import Board
from qlm_planner.estimates import Estimates
from qlm_planner.group_meta import traits_of
from qlm_planner.insertion import Line
from qlm_planner.items import TIERS, Group, Slot
from qlm_planner.policies.baseline import Home, Orders, Seating
from qlm_planner.policies.queue_ends import able_lines
from qlm_planner.terms import Term

Urgency = tuple[int, float, tuple[int, int]]
"""`Group.urgency`: by rank first, not by band."""


@dataclass(slots=True, kw_only=True)
class DatedQueue:
    """One queue in the order of deadlines. `fixed`: groups at its front that stay there. `ends_s`: of each group, from now."""

    slot: Slot
    active_model: str
    left_s: float
    fixed: int = 0
    urgencies: list[Urgency] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, slot: Slot, groups: Sequence[Group], estimates: Estimates, fixed: int = 0) -> DatedQueue:
        """With groups that stand there in this order already."""
        engine = estimates.engine(slot)
        queue = cls(
            slot=slot,
            active_model=engine.active_model,
            left_s=engine.left_s,
            fixed=fixed,
            urgencies=[group.urgency for group in groups],
            terms=[estimates.kept_term(slot, group) for group in groups],
        )
        queue._add_up(0)
        return queue

    def place(self, group: Group) -> int:
        """Behind all that are not less urgent; in front of what stays only for a higher band."""
        if self.fixed and group.band < self.urgencies[self.fixed - 1][0] // TIERS:
            return bisect_right(self.urgencies, group.urgency, hi=self.fixed)
        return bisect_right(self.urgencies, group.urgency, lo=self.fixed)

    def end_s(self, place: int, term: Term) -> float:
        """When a group would end there."""
        return self._free_s(place) + self._setup_s(place, term) + term.work_s + term.own_s

    def insert(self, place: int, group: Group, term: Term) -> None:
        """Costs O(groups behind it)."""
        self.fixed += place < self.fixed
        self.urgencies.insert(place, group.urgency)
        self.terms.insert(place, term)
        self._add_up(place)

    def grown(self, place: int, term: Term) -> None:
        """The group there has other terms now."""
        self.terms[place] = term
        self._add_up(place)

    def _add_up(self, place: int) -> None:
        del self.ends_s[place:]
        for at in range(place, len(self.terms)):
            self.ends_s.append(self._free_s(at) + self._setup_s(at, self.terms[at]) + self.terms[at].work_s)

    def _free_s(self, place: int) -> float:
        return self.ends_s[place - 1] if place else self.left_s

    def _setup_s(self, place: int, term: Term) -> float:
        before = self.terms[place - 1].model if place else self.active_model
        if before == term.model:
            return 0.0
        return term.warm_s if term.model in self.slot.warm_models else term.cold_s


def first_end(queues: Sequence[DatedQueue], estimates: Estimates, group: Group) -> tuple[DatedQueue, int, Term] | None:
    """The queue that would end a group first in the order of deadlines, and its place and terms there; None if none can serve it."""
    best: tuple[float, DatedQueue, int, Term] | None = None
    for queue in queues:
        if estimates.can_serve(queue.slot, group.traits.key.model):
            term, place = estimates.term(queue.slot, group), queue.place(group)
            end_s = queue.end_s(place, term)
            if best is None or end_s < best[0]:
                best = (end_s, queue, place, term)
    return None if best is None else best[1:]


@dataclass(slots=True, kw_only=True)
class ByDeadline:
    """A seating in the order of deadlines."""

    board: Board
    estimates: Estimates
    queues: list[DatedQueue]

    @classmethod
    def of(cls, board: Board, estimates: Estimates) -> ByDeadline:
        """Costs O(groups)."""
        serving = [slot for _, slot in sorted(board.slots.items()) if slot.serving]
        queues = [DatedQueue.of(slot, board.queue_groups(slot.facts.name), estimates) for slot in serving]
        return cls(board=board, estimates=estimates, queues=queues)

    def join(self, facts: RequestFacts, alone: Group) -> Group:
        """The group in front of its place, if it is of the request's kind and has room, else `alone` there."""
        found = first_end(self.queues, self.estimates, alone)
        if found is None:
            ids = self.board.queues[UNASSIGNED]
            place = next((at for at, other in enumerate(ids) if self.board.groups[other].urgency > alone.urgency), len(ids))
            self.board.open_group(alone, place)
            return alone
        queue, place, term = found
        if place:
            before = self.board.groups[queue.terms[place - 1].group_id]
            if before.traits.key == traits_of(facts).key and self._has_room(queue.slot, before, facts):
                self.board.add_request(before, facts)
                queue.grown(place - 1, self.estimates.term(queue.slot, before))
                return before
        self.open(queue, place, alone, term)
        return alone

    def open(self, queue: DatedQueue, place: int, group: Group, term: Term) -> None:
        """Puts a new group on the board."""
        group.instance = queue.slot.facts.name
        queue.insert(place, group, term)
        self.board.open_group(group, place)

    def grown(self, group: Group) -> None:
        """A group has one request more."""
        for queue in self.queues:
            if queue.slot.facts.name == group.instance:
                place = next(at for at, term in enumerate(queue.terms) if term.group_id == group.group_id)
                queue.grown(place, self.estimates.term(queue.slot, group))

    def _has_room(self, slot: Slot, group: Group, facts: RequestFacts) -> bool:
        limits = self.estimates.limits(slot, group.traits.key, group.traits.slo_s, group.waiting_prompt_tokens / max(1, group.waiting))
        if group.live >= limits.live or group.waiting >= limits.waiting:
            return False
        spread_s = self.estimates.policy.group_spread_fraction * group.traits.slo_s
        return facts.slo.kind is SloKind.PRIORITY or facts.deadline_s - group.first_deadline_s <= spread_s


def heads_and_rest(board: Board, estimates: Estimates) -> tuple[list[DatedQueue], list[Group], set[str]]:
    """The queues of the instances that serve with nothing but their heads, where they serve them; all other groups that somebody serves,
    most urgent first; and the ids of both."""
    slots = [slot for _, slot in sorted(board.slots.items()) if slot.serving]
    queues: list[DatedQueue] = []
    rest: list[Group] = []
    named: set[str] = set()
    for slot in slots:
        groups = board.queue_groups(slot.facts.name)
        head = [group for group in groups[:1] if slot.running and estimates.can_serve(slot, group.traits.key.model)]
        queues.append(DatedQueue.of(slot, head, estimates, fixed=len(head)))
        free = [group for group in groups[len(head) :] if any(estimates.can_serve(each, group.traits.key.model) for each in slots)]
        rest += free
        named.update(group.group_id for group in (*head, *free))
    return queues, sorted(rest, key=lambda group: group.urgency), named


def orders_of(queues: Sequence[DatedQueue], board: Board, named: Collection[str]) -> Orders:
    """The queues as orders; groups that nobody serves stay behind, where they are."""
    orders: dict[str, list[str]] = {}
    for queue in queues:
        name = queue.slot.facts.name
        rest = [group_id for group_id in board.queues[name] if group_id not in named]
        orders[name] = [term.group_id for term in queue.terms] + rest
    return orders


def by_deadline(board: Board, estimates: Estimates) -> Orders:
    """All groups anew, most urgent first, each where it would end first; heads that run stay."""
    queues, rest, named = heads_and_rest(board, estimates)
    for group in rest:
        found = first_end(queues, estimates, group)
        assert found is not None, "somebody serves it"
        queue, place, term = found
        queue.insert(place, group, term)
    return orders_of(queues, board, named)


class Edf:
    """The policy. Insertion keeps the order; all is ordered anew only where an instance has nothing to do beside one with several."""

    by_age = False
    slow = False

    def __init__(self) -> None:
        self.fallbacks = 0

    def seating(self, board: Board, estimates: Estimates, now_s: float) -> Seating:
        return ByDeadline.of(board, estimates)

    def home(self, lines: Sequence[Line], estimates: Estimates, group: Group, board: Board, now_s: float) -> Home | None:
        able = able_lines(lines, estimates, group)
        groups = [[board.groups[term.group_id] for term in line.terms] for line in able]
        queues = [DatedQueue.of(line.slot, each, estimates) for line, each in zip(able, groups, strict=True)]
        found = first_end(queues, estimates, group)
        return None if found is None else (able[queues.index(found[0])], found[1])

    def reorder(self, board: Board, estimates: Estimates, now_s: float) -> Orders | None:
        serving = [(name, slot) for name, slot in board.slots.items() if slot.serving]
        idle = any(slot.running == 0 and not board.queues[name] for name, slot in serving)
        crowded = any(len(board.queues[name]) > 1 for name, _ in serving)
        return by_deadline(board, estimates) if idle and crowded else None


class EdfFallback(Edf):
    """While no order meets the SLOs (`planner.overload: edf`): what was ordered by cost is ordered by deadline, and stays so."""

    def reorder(self, board: Board, estimates: Estimates, now_s: float) -> Orders | None:
        orders = by_deadline(board, estimates)
        changes = any(list(order) != board.queues[name] for name, order in orders.items() if not _sorted(board, name))
        return orders if changes else super().reorder(board, estimates, now_s)


def _sorted(board: Board, name: str) -> bool:
    """A queue is in the order of deadlines behind its head."""
    urgencies = [group.urgency for group in board.queue_groups(name)[1:]]
    return urgencies == sorted(urgencies)
