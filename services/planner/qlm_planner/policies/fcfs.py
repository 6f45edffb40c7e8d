"""First come first served, the baseline that QLM is compared with (QLM section 8 runs "vLLM" so), behind a load balancer that knows how
long each queue takes: a request goes to the instance that would start it first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.request import RequestFacts
from qlm_planner.board import Board
from qlm_planner.class_terms import ClassTerms
from qlm_planner.items import Group, Slot
from qlm_planner.policies.baseline import Home, Orders, Seating
from qlm_planner.policies.queue_ends import QueueEnds, able_lines, aged
from qlm_planner.policies.work import QueueWork, Works
from qlm_planner.queues import Line


@dataclass(slots=True, kw_only=True)
class FirstStart:
    """Picks the queue that would start a request first. `queues`: all, by instance; none where there is one queue."""

    works: Works
    queues: dict[str, QueueWork]

    def pick(self, able: Sequence[Slot], facts: RequestFacts, alone: Group) -> Slot:
        """Costs O(instances)."""
        if not self.queues:
            return able[0]
        [works] = self.works.on(able, [alone])
        queues = [self.queues[slot.facts.name] for slot in able]
        starts = [queue.start_s(len(queue.works), work) for queue, work in zip(queues, works, strict=True)]
        first = starts.index(min(starts))
        queues[first].insert(len(queues[first].works), works[first])
        return able[first]


class Fcfs:
    """The policy."""

    by_age = True
    slow = False
    fallbacks = 0

    def __init__(self) -> None:
        self._works: Works | None = None

    def works(self, made: ClassTerms) -> Works:
        self._works = self._works or Works(made=made)
        return self._works

    def seating(self, board: Board, made: ClassTerms, now_s: float) -> Seating:
        """Costs O(groups)."""
        works = self.works(made)
        queues = works.queues(board)
        picker = FirstStart(works=works, queues={queue.slot.facts.name: queue for queue in queues} if len(queues) > 1 else {})
        return QueueEnds(board=board, estimates=made.estimates, picker=picker)

    def home(self, lines: Sequence[Line], made: ClassTerms, group: Group, board: Board, now_s: float) -> Home | None:
        """On the queue that would start it first between the groups older and younger than it."""
        able = able_lines(lines, made, group)
        if not able:
            return None
        works = self.works(made)
        homes = [aged(line, group, board) for line in able]
        [on] = works.on([line.slot for line in able], [group])
        starts = [works.stand(line.slot, line.groups).start_s(place, work) for (line, place), work in zip(homes, on, strict=True)]
        return homes[starts.index(min(starts))]

    def reorder(self, board: Board, made: ClassTerms, now_s: float) -> Orders | None:
        return None
