"""The plan as clients read it: all virtual queues with the predicted completion of each group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qlm_core.vocabulary.request import SloKind
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import lines_of, times_of

Z_P90 = 1.2815515655446004
"""The standard normal's 90% quantile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutlook:
    """One group. Completions are of its last request, in seconds of the queue's clock; 0 if no instance serves it."""

    group_id: str
    model: str
    slo_kind: SloKind
    slo_class: str
    waiting: int
    first_deadline_s: float
    completion_p50_s: float
    completion_p90_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOutlook:
    instance: str
    groups: tuple[GroupOutlook, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """All virtual queues at one plan version."""

    version: int
    made_s: float
    queues: tuple[QueueOutlook, ...]


def plan_view(board: Board, table: ClassTable, now_s: float) -> PlanView:
    """The plan now. O(groups)."""
    lines = lines_of(board, table, now_s) if table.estimates.ready else []
    predicted: dict[str, tuple[float, float]] = {}
    if lines:
        times = times_of(lines, table)
        p90_s = times.end_s + Z_P90 * np.sqrt(times.end_variance)
        groups = (group.group_id for line in lines for group in line.groups)
        predicted = dict(zip(groups, zip((now_s + times.end_s).tolist(), (now_s + p90_s).tolist(), strict=True), strict=True))
    queues = tuple(
        QueueOutlook(
            instance=name, groups=tuple(_outlook(group, *predicted.get(group.group_id, (0.0, 0.0))) for group in board.queue_groups(name))
        )
        for name in sorted(board.queues)
    )
    return PlanView(version=board.plan_version, made_s=now_s, queues=queues)


def _outlook(group: Group, p50_s: float, p90_s: float) -> GroupOutlook:
    key = group.traits.key
    return GroupOutlook(
        group_id=group.group_id,
        model=key.model,
        slo_kind=key.slo_kind,
        slo_class=key.slo_class,
        waiting=group.waiting,
        first_deadline_s=group.first_deadline_s,
        completion_p50_s=p50_s,
        completion_p90_s=p90_s,
    )
