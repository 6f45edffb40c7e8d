"""First come first served, the baseline that QLM is compared with (QLM section 8 runs "vLLM" so).

It stands for engines that each serve their own queue in the order of arrival behind a load balancer that knows how long each queue takes:
a request goes to the instance that would start it first and stays there, and the engine swaps models whenever the next request wants
another one. Objectives and priorities change nothing, and nothing is ordered anew; only what an instance can serve no more (it is lost,
or drains) moves to others, by its age.

So that groups do not reorder arrivals, a request joins only the last group of its queue, and only one of its own kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.instance import UNASSIGNED
from qlm_core.queue_tail import QueueTail
from qlm_core.request import RequestFacts
from qlm_planner.board import Board, Group, Slot
from qlm_planner.estimates import Estimates
from qlm_planner.group_meta import traits_of
from qlm_planner.insertion import Line
from qlm_planner.terms import Engine, Term
from qlm_planner.timeline import timeline


@dataclass(slots=True, kw_only=True)
class Tail:
    """The end of one virtual queue, as the model of queues has it."""

    slot: Slot
    queue: QueueTail

    @classmethod
    def of(cls, slot: Slot, engine: Engine, terms: Sequence[Term]) -> Tail:
        tail = cls(slot=slot, queue=QueueTail.behind(engine.active_model, engine.left, engine.drain_s))
        for term in terms:
            tail.append(term)
        return tail

    def start_s(self, term: Term) -> float:
        """When the first request of a group behind all others would start, in seconds from now."""
        return self.queue.first_start_s(term.model, term.each, self._swap_s(term), term.warm_s)

    def append(self, term: Term) -> None:
        self.queue.append(term.model, term.each, term.ends, term.count, self._swap_s(term), term.warm_s)

    def _swap_s(self, term: Term) -> float:
        return term.warm_s if term.model in self.slot.warm_models else term.cold_s


@dataclass(slots=True, kw_only=True)
class ArrivalOrder:
    """The ends of all queues, for one batch of arrivals. `tails`: of the instances that serve, by name."""

    board: Board
    estimates: Estimates
    tails: list[Tail]

    @classmethod
    def of(cls, board: Board, estimates: Estimates) -> ArrivalOrder:
        """Costs O(groups)."""
        tails = []
        for name, slot in sorted(board.slots.items()):
            if slot.serving:
                terms = [estimates.kept_term(slot, group) for group in board.queue_groups(name)]
                tails.append(Tail.of(slot, estimates.engine(slot), terms))
        return cls(board=board, estimates=estimates, tails=tails)

    def join(self, facts: RequestFacts, alone: Group) -> Group:
        """The group that takes a request: the last one of the queue that would start it first, or `alone`, a group of nothing but this
        request, at the end of that queue. Costs O(instances)."""
        able = [(tail, self.estimates.term(tail.slot, alone)) for tail in self.tails if self.estimates.can_serve(tail.slot, facts.model)]
        if not able:
            return self._append(UNASSIGNED, None, facts, alone)
        tail, term = min(able, key=lambda each: each[0].start_s(each[1]))
        tail.append(term)
        return self._append(tail.slot.facts.name, tail.slot, facts, alone)

    def _append(self, queue: str, slot: Slot | None, facts: RequestFacts, alone: Group) -> Group:
        ids = self.board.queues[queue]
        last = self.board.groups[ids[-1]] if ids else None
        if last is not None and last.traits.key == traits_of(facts).key:
            mean_tokens = last.waiting_prompt_tokens / max(1, last.waiting)
            if last.live < self.estimates.limits(slot, last.traits.key, last.traits.slo_s, mean_tokens).live:
                self.board.add_request(last, facts.prompt_tokens, facts.deadline_s)
                return last
        alone.instance = queue
        self.board.open_group(alone, len(ids))
        return alone


def place_by_age(lines: Sequence[Line], estimates: Estimates, group: Group, board: Board, now_s: float) -> tuple[Line, int] | None:
    """A home for a group whose instance serves it no more: between the groups older and younger than it, on the queue that would start
    it first there; None if no line can serve it."""
    best: tuple[float, Line, int] | None = None
    for line in lines:
        if estimates.can_serve(line.slot, group.traits.key.model):
            position = position_by_age([term.group_id for term in line.terms], group, board)
            columns = line.with_term(position, estimates.term(line.slot, group))
            start_s = float(timeline(line.engine, columns, now_s).start_s[position])
            if best is None or start_s < best[0]:
                best = (start_s, line, position)
    return None if best is None else (best[1], best[2])


def position_by_age(queue: Sequence[str], group: Group, board: Board) -> int:
    """In front of the first younger group."""
    return next((at for at, other in enumerate(queue) if board.groups[other].order > group.order), len(queue))
