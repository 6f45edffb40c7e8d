"""Shedding (`planner.overload: shed`, QLM A.3, c): fails late requests of the lowest value.

After each overview the groups with expected late requests are valued: weight of a request over its engine time. The lowest one loses its
expected late requests: the oldest if they are late even alone, else the newest, which are served last. A group must be late for several
overviews: `PlanChanges` has tried a better order by then."""

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

ROUNDS_MIN = 3
"""Consecutive overviews with late requests after which a group loses requests."""


@dataclass(slots=True, kw_only=True)
class Shedding:
    """`rounds`: consecutive overviews at which each group was late. `due`: the next call. `calling`: a call is under way."""

    policy: Policy
    rounds: dict[str, int] = field(default_factory=dict)
    due: Shed | None = None
    calling: bool = False
    next_s: float = -math.inf

    def find_late(self, board: Board, table: ClassTable, now_s: float) -> None:
        """Chooses the next call, after an overview. O(groups)."""
        self.due = None
        late: list[tuple[float, float, Group, bool]] = []
        lines = lines_of(board, table, now_s)
        if not lines:
            return
        times, rows = times_of(lines, table), np.concatenate([line.rows for line in lines], axis=1)
        groups = [group for line in lines for group in line.groups]
        expected = rows[COUNT] * np.array([group.due_share for group in groups]) * times.late
        # The newest are late, unless the oldest are late even alone, or later deadlines are further apart than the work. Answered requests
        # stand in front and are not late.
        oldest = (rows[OWN] > rows[DEADLINE]) | (rows[WORK] < rows[SPREAD])
        for at in np.flatnonzero((expected >= 1.0) & (rows[WORK] > 0.0)).tolist():
            group = groups[at]
            late.append((float(rows[REQUESTS, at] / rows[WORK, at]), float(expected[at]), group, not group.answered and bool(oldest[at])))
        self.rounds = {group.group_id: self.rounds.get(group.group_id, 0) + 1 for _, _, group, _ in late}
        ripe = [each for each in late if self.rounds[each[2].group_id] >= ROUNDS_MIN]
        if not ripe or now_s < self.next_s:
            return
        _, expected, group, oldest = min(ripe, key=lambda each: (each[0], -each[1], each[2].group_id))
        count = min(int(expected), self.policy.shed_max, BATCH_MAX)
        self.due = Shed(group_id=group.group_id, keep=group.waiting - count, count=count, oldest=oldest)

    def call(self, now_s: float) -> Shed | None:
        """The call to send now, if any: at most `shed_max` requests in `shed_every_s`."""
        if self.calling or self.due is None:
            return None
        due, self.due = self.due, None
        self.calling = True
        self.next_s = now_s + self.policy.shed_every_s
        return due

    def answered(self) -> None:
        self.calling = False
