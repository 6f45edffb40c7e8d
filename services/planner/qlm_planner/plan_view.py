"""The plan as others see it: all virtual queues with the predicted completion of each group."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.request import SloKind
from qlm_planner.board import Board
from qlm_planner.estimates import Estimates
from qlm_planner.insertion import Line
from qlm_planner.items import Group

Z_P90 = 1.2815515655446004
"""The standard normal's 90% quantile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutlook:
    """One group. Completions are of the whole group, in seconds of the queue's clock; 0 where nobody serves it."""

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
    """All virtual queues at one version."""

    version: int
    made_s: float
    queues: tuple[QueueOutlook, ...]


def plan_view(board: Board, estimates: Estimates, now_s: float) -> PlanView:
    """Costs O(groups)."""
    queues: list[QueueOutlook] = []
    for name in sorted(board.queues):
        groups = board.queue_groups(name)
        slot = board.slots.get(name)
        if slot is None or not slot.alive or not estimates.ready:
            outlooks = tuple(_outlook(group, 0.0, 0.0) for group in groups)
        else:
            times = Line.of(slot, groups, estimates).timeline(now_s)
            outlooks = tuple(
                _outlook(group, now_s + float(end_s), now_s + float(end_s) + Z_P90 * math.sqrt(float(variance)))
                for group, end_s, variance in zip(groups, times.end_s, times.end_variance, strict=True)
            )
        queues.append(QueueOutlook(instance=name, groups=outlooks))
    return PlanView(version=board.plan_version, made_s=now_s, queues=tuple(queues))


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
