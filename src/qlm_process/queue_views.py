"""From the queue as read (`Overview`) to what prediction takes (`QueueView`)."""

from __future__ import annotations

import math

import structlog

from qlm_core.instance import InstanceFacts
from qlm_core.prediction import GroupView, QueueView
from qlm_core.request import SloKind
from qlm_process.instance_wire import from_body
from qlm_queue.values import GroupRecord, Overview


def instances_in(overview: Overview) -> tuple[InstanceFacts, ...]:
    """The registered instances whose lease holds, in the overview's order. One whose stored body is no instance is logged and left out,
    so that it does not take the others with it."""
    found: list[InstanceFacts] = []
    for record in overview.instances:
        if record.alive:
            try:
                found.append(from_body(record.body, record.incarnation))
            except ValueError as error:
                structlog.get_logger().warning("instance_unreadable", instance=record.name, error=str(error))
    return tuple(found)


def queue_views(overview: Overview) -> tuple[QueueView, ...]:
    """One view for each instance whose lease holds. One that has not said which model is active has none loaded, so that the wait
    includes a load."""
    queues = {record.instance: record for record in overview.virtual_queues}
    views: list[QueueView] = []
    for facts in instances_in(overview):
        record = queues.get(facts.name)
        groups: tuple[GroupView, ...] = ()
        if record is not None:
            groups = tuple(group_view(overview.groups[group_id]) for group_id in record.group_ids if group_id in overview.groups)
        running = 0 if record is None else record.running
        views.append(QueueView(instance=facts, active_model=facts.active_model, running=running, groups=groups))
    return tuple(views)


def group_view(record: GroupRecord) -> GroupView:
    """A group by its record; the meta keys are those of `GroupPlacement.meta` as the planner writes them."""
    kind = record.meta.get("slo_kind", "")
    return GroupView(
        group_id=record.group_id,
        model=record.meta.get("model", ""),
        slo_kind=SloKind(kind) if kind else SloKind.COMPLETION,
        slo_class=record.meta.get("slo_class", ""),
        token_class=record.meta.get("token_class", ""),
        waiting=record.waiting,
        waiting_prompt_tokens=record.waiting_prompt_tokens,
        first_deadline_s=math.inf if kind == SloKind.PRIORITY else record.first_deadline_s,
    )
