"""First come first served, the baseline that QLM is compared with (QLM section 8 runs "vLLM" so), behind a load balancer that knows how
long each queue takes: a request goes to the instance that would start it first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.request import RequestFacts
from qlm_planner.board import Board
from qlm_planner.estimates import Estimates
from qlm_planner.insertion import Line
from qlm_planner.items import Group, Slot
from qlm_planner.policies.baseline import Home, Orders, Seating
from qlm_planner.policies.queue_ends import QueueEnds, able_lines, aged
from qlm_planner.policies.tails import Tail
from qlm_planner.terms import Engine, Term
from qlm_planner.timeline import timeline


@dataclass(slots=True, kw_only=True)
class FirstStart:
    """Picks the queue that would start a request first. `tails`: the ends of all queues, by instance; none where there is one queue."""

    estimates: Estimates
    tails: dict[str, Tail]

    def pick(self, able: Sequence[Slot], facts: RequestFacts, alone: Group) -> Slot:
        """Costs O(instances)."""
        if not self.tails:
            return able[0]
        options = [(self.tails[slot.facts.name], self.estimates.term(slot, alone)) for slot in able]
        # With a free seat everywhere all would start it at once: then the one that runs least.
        tail, term = min(options, key=lambda each: (each[0].start_s(each[1]), each[0].slot.running))
        self.tails[tail.slot.facts.name] = tail.with_term(term)
        return tail.slot


class Fcfs:
    """The policy. It keeps the end of each queue, with what that follows from."""

    by_age = True
    slow = False
    fallbacks = 0

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Engine, tuple[str, ...], list[Term], Tail]] = {}

    def seating(self, board: Board, estimates: Estimates, now_s: float) -> Seating:
        """Costs O(groups)."""
        serving = [(name, slot) for name, slot in sorted(board.slots.items()) if slot.serving]
        tails = {name: self._tail(board, slot, estimates) for name, slot in serving} if len(serving) > 1 else {}
        return QueueEnds(board=board, estimates=estimates, picker=FirstStart(estimates=estimates, tails=tails))

    def _tail(self, board: Board, slot: Slot, estimates: Estimates) -> Tail:
        """Where nothing but new groups came to the queue, only these are added up."""
        engine = estimates.engine(slot)
        terms = [estimates.kept_term(slot, group) for group in board.queue_groups(slot.facts.name)]
        last, warm_models, known, tail = self._kept.get(slot.facts.name, (None, (), [], None))
        if tail is None or last is not engine or warm_models != slot.warm_models or terms[: len(known)] != known:
            known, tail = [], Tail.of(slot, engine)
        for term in terms[len(known) :]:
            tail.append(term)
        self._kept[slot.facts.name] = (engine, slot.warm_models, terms, tail)
        return tail

    def home(self, lines: Sequence[Line], estimates: Estimates, group: Group, board: Board, now_s: float) -> Home | None:
        """On the queue that would start it first between the groups older and younger than it."""
        best: tuple[float, Home] | None = None
        for line in able_lines(lines, estimates, group):
            found = aged(line, group, board)
            columns = line.with_term(found[1], estimates.term(line.slot, group))
            start_s = float(timeline(line.engine, columns, now_s).start_s[found[1]])
            if best is None or start_s < best[0]:
                best = (start_s, found)
        return None if best is None else best[1]

    def reorder(self, board: Board, estimates: Estimates, now_s: float) -> Orders | None:
        return None
