"""First come first served, QLM's baseline ("vLLM" in section 8), behind a load balancer that predicts times: a request is assigned to the
instance that starts it first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.vocabulary.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.baseline import Baseline, Home, Seating
from qlm_planner.policies.queue_ends import QueueEnds, aged
from qlm_planner.policies.queue_work import QueueWork, Works


@dataclass(slots=True, kw_only=True)
class FirstStart:
    """Picks the queue that starts a request first. `queues`: by instance; empty if there is only one."""

    works: Works
    queues: dict[str, QueueWork]

    def pick(self, able: Sequence[Slot], facts: RequestFacts, alone: Group) -> Slot:
        """One of `able`. O(instances)."""
        if not self.queues:
            return able[0]
        [works] = self.works.on(able, [alone])
        queues = [self.queues[slot.facts.name] for slot in able]
        starts = [queue.start_s(len(queue.works), work) for queue, work in zip(queues, works, strict=True)]
        first = starts.index(min(starts))
        queues[first].insert(len(queues[first].works), works[first])
        return able[first]


class Fcfs(Baseline):
    """First come first served."""

    def seating(self, board: Board, table: ClassTable, now_s: float) -> Seating:
        """The seating on all serving instances. O(groups)."""
        works = self.works(table)
        queues = works.queues(board)
        picker = FirstStart(works=works, queues={queue.slot.facts.name: queue for queue in queues} if len(queues) > 1 else {})
        return QueueEnds(board=board, estimates=table.estimates, pick=picker.pick)

    def home(self, lines: Sequence[Line], table: ClassTable, group: Group, board: Board, now_s: float) -> Home:
        """The queue that starts a group first, at its position by age."""
        works = self.works(table)
        homes = [aged(line, group, board) for line in lines]
        [on] = works.on([line.slot for line in lines], [group])
        starts = [works.stand(line.slot, line.groups).start_s(place, work) for (line, place), work in zip(homes, on, strict=True)]
        return homes[starts.index(min(starts))]
