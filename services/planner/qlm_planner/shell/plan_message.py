"""The plan as clients read it: all virtual queues with the predicted completion of each group."""

from __future__ import annotations

import numpy as np

from qlm.api.v1 import planner_pb2
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import lines_of, times_of
from qlm_process.wire.slo import SLO_KIND_NUMBERS

Z_P90 = 1.2815515655446004
"""The standard normal's 90% quantile."""


def plan_message(board: Board, table: ClassTable, now_s: float) -> planner_pb2.Plan:
    """The plan now, without advice. Completions are of a group's last request, in seconds of the queue's clock; 0 if no instance serves it.
    O(groups)."""
    lines = lines_of(board, table, now_s) if table.estimates.ready else []
    predicted: dict[str, tuple[float, float]] = {}
    if lines:
        times = times_of(lines, table)
        p90_s = times.end_s + Z_P90 * np.sqrt(times.end_variance)
        groups = (group.group_id for line in lines for group in line.groups)
        predicted = dict(zip(groups, zip((now_s + times.end_s).tolist(), (now_s + p90_s).tolist(), strict=True), strict=True))
    queues = [
        planner_pb2.PlannedQueue(
            instance=name, groups=[_planned(group, *predicted.get(group.group_id, (0.0, 0.0))) for group in board.queue_groups(name)]
        )
        for name in sorted(board.queues)
    ]
    return planner_pb2.Plan(version=board.plan_version, made_s=now_s, queues=queues)


def _planned(group: Group, p50_s: float, p90_s: float) -> planner_pb2.PlannedGroup:
    key = group.traits.key
    return planner_pb2.PlannedGroup(
        group_id=group.group_id,
        model=key.model,
        slo_kind=SLO_KIND_NUMBERS[key.slo_kind],
        slo_class=key.slo_class,
        waiting=group.waiting,
        first_deadline_s=group.first_deadline_s,
        completion_p50_s=p50_s,
        completion_p90_s=p90_s,
    )
