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
from qlm_planner.timeline import timeline


@dataclass(slots=True, kw_only=True)
class FirstStart:
    """Picks the queue that would start a request first. `tails`: the ends of all queues, by instance."""

    estimates: Estimates
    tails: dict[str, Tail]

    @classmethod
    def of(cls, board: Board, estimates: Estimates) -> FirstStart:
        """Costs O(groups)."""
        tails = {}
        for name, slot in sorted(board.slots.items()):
            if slot.serving:
                terms = [estimates.kept_term(slot, group) for group in board.queue_groups(name)]
                tails[name] = Tail.of(slot, estimates.engine(slot), terms)
        return cls(estimates=estimates, tails=tails)

    def pick(self, able: Sequence[Slot], facts: RequestFacts, alone: Group) -> Slot:
        """Costs O(instances)."""
        options = [(self.tails[slot.facts.name], self.estimates.term(slot, alone)) for slot in able]
        # With a free seat everywhere all would start it at once: then the one that runs least.
        tail, term = min(options, key=lambda each: (each[0].start_s(each[1]), each[0].slot.running))
        tail.append(term)
        return tail.slot


class Fcfs:
    """The policy."""

    by_age = True
    slow = False
    fallbacks = 0

    def seating(self, board: Board, estimates: Estimates, now_s: float) -> Seating:
        return QueueEnds(board=board, estimates=estimates, picker=FirstStart.of(board, estimates))

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
