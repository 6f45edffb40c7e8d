"""Policies that append: a request goes to the end of a queue and stays there. They differ in the queue they pick.

They stand for engines that each serve their own queue in the order of arrival behind a load balancer, and swap models whenever the next
request wants another one. Objectives and priorities change nothing, and nothing is ordered anew; only what an instance can serve no more
(it is lost, or drains) moves to others, by its age. So that groups do not reorder arrivals, a request joins only the last group of its
queue, and only one of its own kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from qlm_core.instance import UNASSIGNED
from qlm_core.request import RequestFacts
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line
from qlm_planner.policies.baseline import Home


class Picker(Protocol):
    """Picks a queue for each of one batch of arrivals."""

    def pick(self, able: Sequence[Slot], facts: RequestFacts, alone: Group) -> Slot:
        """One of `able`, which are in the order of their names and at least one."""


@dataclass(slots=True, kw_only=True)
class QueueEnds:
    """A seating at the ends of queues."""

    board: Board
    estimates: Estimates
    picker: Picker

    def join(self, facts: RequestFacts, alone: Group) -> Group:
        """The last group of the queue that is picked, if it is of the request's kind and has room, else `alone` behind it."""
        able = [slot for slot in self.board.serving if self.estimates.can_serve(slot, facts.model)]
        slot = self.picker.pick(able, facts, alone) if able else None
        queue = UNASSIGNED if slot is None else slot.facts.name
        return join_or_open(self.board, self.estimates, queue, len(self.board.queues[queue]), facts, alone)


def join_or_open(board: Board, estimates: Estimates, queue: str, place: int, facts: RequestFacts, alone: Group) -> Group:
    """The group in front of a place, if it is of the request's kind and has room, else `alone` there."""
    if place:
        before = board.groups[board.queues[queue][place - 1]]
        if before.traits.key == alone.traits.key and before.live < estimates.limits_at(board.slots.get(queue), before).live:
            board.add_request(before, facts)
            return before
    alone.instance = queue
    board.open_group(alone, place)
    return alone


def loads_of(board: Board) -> dict[str, int]:
    """Requests that wait on each instance's queue or run there. Costs O(groups)."""
    return {name: slot.running + sum(group.waiting for group in board.queue_groups(name)) for name, slot in board.slots.items()}


IMBALANCE_REQUESTS, IMBALANCE_RATIO = 64, 1.5
"""An instance is clearly more loaded than another with so many requests more and so many times as many: the defaults by which SGLang's
router leaves the instance with the right cache for the shortest queue."""


def least_loaded_of(names: Sequence[str], serving: Sequence[str], loads: Mapping[str, int]) -> str:
    """The one of `serving` with the fewest requests, unless one of all `names` has clearly fewer; where none serves, the one with the
    fewest. `names` are at least one."""
    least = min(names, key=lambda name: (loads[name], name))
    near = min(serving, key=lambda name: (loads[name], name), default=least)
    far = loads[near] - loads[least] > IMBALANCE_REQUESTS and loads[near] > IMBALANCE_RATIO * loads[least]
    return least if far else near


def position_by_age(queue: Sequence[str], group: Group, board: Board) -> int:
    """In front of the first younger group."""
    return next((at for at, other in enumerate(queue) if board.groups[other].order > group.order), len(queue))


def able_lines(lines: Sequence[Line], table: ClassTable, group: Group) -> list[Line]:
    """Those that can serve a group."""
    return [line for line in lines if table.estimates.can_serve(line.slot, group.traits.key.model)]


def aged(line: Line, group: Group, board: Board) -> Home:
    """Between the groups of a line that are older and younger."""
    return line, position_by_age([each.group_id for each in line.groups], group, board)
