"""Shedding under overload (`planner.overload: shed`, QLM A.3, c): requests that would be late anyway are failed, lowest value first.

At each look at the queue the groups that the plan expects to be late are valued: weight of a request over the engine time that it takes.
The lowest loses as many requests as are expected to be late in it, from its old end where those can no more be in time even alone, else
from its new end, which is served last. Nothing is shed for one look alone: a better order comes first (`PlanChanges` has tried one by
then)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.cost.order_cost import COUNT, DEADLINE, OWN, REQUESTS, SPREAD, WORK
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import lines_of, times_of
from qlm_planner.machine.effects import Shed
from qlm_planner.policy import BATCH_MAX, Policy

LOOKS_MIN = 3
"""Looks in a row at which a group is expected to be late before it loses requests."""


@dataclass(slots=True, kw_only=True)
class Shedding:
    """`looks`: how often in a row each group was expected to be late. `due`: what is to be shed now. `calling`: a call is under way."""

    policy: Policy
    looks: dict[str, int] = field(default_factory=dict)
    due: Shed | None = None
    calling: bool = False
    next_s: float = -math.inf

    def look(self, board: Board, table: ClassTable, now_s: float) -> None:
        """After an overview. Costs O(groups)."""
        self.due = None
        late: list[tuple[float, float, Group, bool]] = []
        lines = lines_of(board, table, now_s)
        if not lines:
            return
        times, rows = times_of(lines, table), np.concatenate([line.rows for line in lines], axis=1)
        groups = [group for line in lines for group in line.groups]
        expected = rows[COUNT] * np.array([group.due_share for group in groups]) * times.late
        # The last are late, but where the first cannot make it at all, or those behind them have more time than they wait. Who is answered
        # stands in front and is not late.
        oldest = (rows[OWN] > rows[DEADLINE]) | (rows[WORK] < rows[SPREAD])
        for at in np.flatnonzero((expected >= 1.0) & (rows[WORK] > 0.0)).tolist():
            group = groups[at]
            late.append((float(rows[REQUESTS, at] / rows[WORK, at]), float(expected[at]), group, not group.answered and bool(oldest[at])))
        self.looks = {group.group_id: self.looks.get(group.group_id, 0) + 1 for _, _, group, _ in late}
        ripe = [each for each in late if self.looks[each[2].group_id] >= LOOKS_MIN]
        if not ripe or now_s < self.next_s:
            return
        _, expected, group, oldest = min(ripe, key=lambda each: (each[0], -each[1], each[2].group_id))
        count = min(int(expected), self.policy.shed_max, BATCH_MAX)
        self.due = Shed(group_id=group.group_id, keep=group.waiting - count, count=count, oldest=oldest)

    def call(self, now_s: float) -> Shed | None:
        """The call to make now, if any: at most `shed_max` requests in `shed_every_s`."""
        if self.calling or self.due is None:
            return None
        due, self.due = self.due, None
        self.calling = True
        self.next_s = now_s + self.policy.shed_every_s
        return due

    def answered(self) -> None:
        self.calling = False
