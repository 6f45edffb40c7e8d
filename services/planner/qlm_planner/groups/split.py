"""Splits waiting groups (QLM algorithm 1): the queue moves requests to another group (ADR 16).

A group opens within its instance's limits. A smaller batch, another instance or evicted requests may take it above `split_excess` x its
limit: the latest requests beyond the limit then move to a new group right behind it. Parts are within the limit, so a limit that varies
splits once. Groups are checked after an overview, some in turn; a call has the lowest priority and is rare.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.cost.estimates import Estimates
from qlm_planner.groups.assignment import GroupAssignment, opening_of
from qlm_planner.machine.effects import Regroup
from qlm_planner.machine.events import Regrouped
from qlm_planner.policy import Policy


@dataclass(slots=True, kw_only=True)
class GroupSplits:
    """`due`: ids of groups found above their limit, checked again before the call. `opening`: the group that the call under way opens.
    `turn`: groups still to check in this round."""

    policy: Policy
    due: deque[str] = field(default_factory=deque)
    opening: Group | None = None
    turn: deque[str] = field(default_factory=deque)
    next_s: float = -math.inf

    def find_due(self, board: Board, estimates: Estimates) -> None:
        """Finds the groups to split, after an overview."""
        self.due.clear()
        if not self.turn:
            self.turn.extend(group_id for queue in board.queues.values() for group_id in queue)
        for _ in range(min(len(self.turn), self.policy.regroup_checks)):
            group = board.groups.get(self.turn.popleft())
            if group is not None and self._too_many(group, board, estimates):
                self.due.append(group.group_id)

    def call(self, board: Board, estimates: Estimates, assignment: GroupAssignment, now_s: float) -> Regroup | None:
        """The next call, if one is due."""
        if now_s < self.next_s:
            return None
        while self.due:
            group = board.groups.get(self.due.popleft())
            many = 0 if group is None else self._too_many(group, board, estimates)
            if group is not None and many:
                self.next_s = now_s + self.policy.regroup_every_s
                return self._split(group, many, board, assignment)
        return None

    def answered(self, event: Regrouped, board: Board) -> tuple[str, ...]:
        """Applies the answer to the board; returns the ids of both groups, whose counts earlier events may have missed."""
        call, opened = event.call, self.opening
        self.opening = None
        source = board.groups.get(call.source)
        into = board.groups.get(call.into.group_id, opened)
        if source is not None and into is not None and event.count:
            into.first_deadline_s = min(into.first_deadline_s, event.first_deadline_s)
            into.next_deadline_s = min(into.next_deadline_s, event.first_deadline_s)
            into.last_deadline_s = max(into.last_deadline_s, event.last_deadline_s)
            board.regroup(source, into, event.count, event.prompt_tokens)
            if into is opened:
                board.count_opening(into.instance)
        return (call.source, call.into.group_id)

    def _too_many(self, group: Group, board: Board, estimates: Estimates) -> int:
        """Waiting requests beyond the limit of a group to split; 0 for others, and for a group that is about to move."""
        slot = board.slots.get(group.instance)
        if slot is None or not group.open or not estimates.can_serve(slot, group.traits.key.model):
            return 0
        limit = estimates.limits_at(slot, group).waiting
        return group.waiting - limit if group.waiting > self.policy.split_excess * limit else 0

    def _split(self, group: Group, many: int, board: Board, assignment: GroupAssignment) -> Regroup:
        count = min(many, self.policy.regroup_max)
        self.opening = assignment.part_of(group)
        into = opening_of(self.opening, board.successor(group))
        return Regroup(source=group.group_id, keep=group.waiting - count, count=count, into=into)
