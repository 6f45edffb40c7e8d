"""Policies that append: a request stays at the end of a queue. They differ in the choice of the queue.

They stand for engines that serve their queues in the order of arrival behind a load balancer, and swap models whenever the next request
needs another one. Objectives and priorities change nothing; only groups whose instance is lost or drains move, by age. A request joins only
the last group of its queue, and only one with its key, so groups keep the order of arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.baseline import Home

Pick = Callable[[Sequence[Slot], RequestFacts, Group], Slot]
"""Picks a queue for a request, and for the group of it alone: one of these, at least one, sorted by name."""


@dataclass(slots=True, kw_only=True)
class QueueEnds:
    """Seats requests at the ends of queues."""

    board: Board
    estimates: Estimates
    pick: Pick

    def join(self, facts: RequestFacts, alone: Group) -> Group:
        """The last group of the picked queue, if it has the request's key and room, else `alone` behind it."""
        able = [slot for slot in self.board.serving if self.estimates.can_serve(slot, facts.model)]
        slot = self.pick(able, facts, alone) if able else None
        queue = UNASSIGNED if slot is None else slot.facts.name
        return join_or_open(self.board, self.estimates, queue, len(self.board.queues[queue]), facts, alone)


def join_or_open(board: Board, estimates: Estimates, queue: str, place: int, facts: RequestFacts, alone: Group) -> Group:
    """The group in front of a position, if it has the request's key and room, else `alone` there."""
    if place:
        before = board.groups[board.queues[queue][place - 1]]
        if before.traits.key == alone.traits.key and before.live < estimates.limits_at(board.slots.get(queue), before).live:
            board.add_request(before, facts)
            return before
    alone.instance = queue
    board.open_group(alone, place)
    return alone


def loads_of(board: Board) -> dict[str, int]:
    """Waiting and running requests of each instance. O(groups)."""
    return {name: slot.running + sum(group.waiting for group in board.queue_groups(name)) for name, slot in board.slots.items()}


def end_model(board: Board, slot: Slot) -> str:
    """Model of the last group on an instance's queue, else the active one."""
    queue = board.queues[slot.facts.name]
    return board.groups[queue[-1]].traits.key.model if queue else slot.active_model


IMBALANCE_REQUESTS, IMBALANCE_RATIO = 64, 1.5
"""An instance is overloaded beside another one with so many requests more, by difference and ratio: the defaults of SGLang's router, which
then leaves the cached instance for the shortest queue."""


def least_loaded_of(names: Sequence[str], serving: Sequence[str], loads: Mapping[str, int]) -> str:
    """The least loaded of `serving`, unless one of `names` (at least one) is much less loaded; without any, the least loaded of `names`."""
    least = min(names, key=lambda name: (loads[name], name))
    near = min(serving, key=lambda name: (loads[name], name), default=least)
    far = loads[near] - loads[least] > IMBALANCE_REQUESTS and loads[near] > IMBALANCE_RATIO * loads[least]
    return least if far else near


def position_by_age(queue: Sequence[str], group: Group, board: Board) -> int:
    """The position in front of the first younger group."""
    return next((at for at, other in enumerate(queue) if board.groups[other].order > group.order), len(queue))


def aged(line: Line, group: Group, board: Board) -> Home:
    """A group's position by age on a line."""
    return line, position_by_age([each.group_id for each in line.groups], group, board)
