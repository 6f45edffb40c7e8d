"""From the queue as read (`Overview`) to what prediction takes (`QueueView`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from qlm_core.instance import InstanceFacts
from qlm_core.prediction_views import GroupView, QueueView, RunningView
from qlm_core.reported_runs import RunsTold, with_reported_outputs
from qlm_core.request import SloKind
from qlm_process.wire import running as running_wire
from qlm_process.wire.instance import from_body
from qlm_queue.overview import InstanceRecord, Overview
from qlm_queue.values import GroupRecord

_SLO_KINDS = frozenset(SloKind)
TOLD_MAX_S = 10.0
"""Agents tell what runs every second."""


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


class KeptViews:
    """Views of groups, made anew where the record is another than at the last look."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[GroupRecord, GroupView]] = {}

    def of(self, groups: Mapping[str, GroupRecord]) -> Mapping[str, GroupView]:
        """By group id. Forgets all others."""
        kept = self._kept
        self._kept = {}
        for group_id, record in groups.items():
            known = kept.get(group_id)
            same = known is not None and (known[0] is record or known[0] == record)
            self._kept[group_id] = known if known is not None and same else (record, group_view(record))
        return {group_id: view for group_id, (_, view) in self._kept.items()}


def queue_views(
    overview: Overview, *, now_s: float = 0.0, arrivals_per_s: float = 0.0, kept: KeptViews | None = None
) -> tuple[QueueView, ...]:
    """One view for each instance whose lease holds. One that has not said which model is active has none loaded, so that the wait
    includes a load. `now_s`: of the queue's clock, to tell for how long a load has been under way. `arrivals_per_s`: of all requests; what
    comes is taken to go where most are served and wait now. `kept`: of the look before this one."""
    of_group = (kept or KeptViews()).of(overview.groups)
    queues = {record.instance: record for record in overview.virtual_queues}
    runners = _runners(overview)
    told = {record.name: _told(record, now_s) for record in overview.instances if record.alive}
    views: list[QueueView] = []
    for facts in instances_in(overview):
        record = queues.get(facts.name)
        groups: tuple[GroupView, ...] = ()
        if record is not None:
            groups = tuple(of_group[group_id] for group_id in record.group_ids if group_id in of_group)
        running = 0 if record is None else record.running
        views.append(
            QueueView(
                instance=facts,
                active_model=facts.active_model,
                running=running,
                groups=groups,
                warm_models=facts.warm_models,
                runners=_views_of(runners.get((facts.name, facts.active_model), {}), running, told.get(facts.name), now_s),
                loading_s=max(0.0, now_s - facts.loading_since_s) if facts.loading_since_s > 0.0 else None,
            )
        )
    return _with_arrivals(views, arrivals_per_s)


def _told(record: InstanceRecord, now_s: float) -> RunsTold | None:
    """What an agent told of its runs; None for what is too old to go by."""
    told = running_wire.from_body(record.body)
    return told if told is not None and now_s - told.at_s <= TOLD_MAX_S else None


def _with_arrivals(views: Sequence[QueueView], arrivals_per_s: float) -> tuple[QueueView, ...]:
    loads = [view.running + sum(group.waiting for group in view.groups) for view in views]
    if arrivals_per_s <= 0.0 or not sum(loads):
        return tuple(views)
    return tuple(replace(view, arrivals_per_s=arrivals_per_s * load / sum(loads)) for view, load in zip(views, loads, strict=True))


@dataclass(slots=True)
class _Class:
    """Requests of one class that run somewhere: how many, the most urgent band and deadline, and their groups."""

    count: int
    band: int
    deadline_s: float
    group_ids: list[str]


def _runners(overview: Overview) -> Mapping[tuple[str, str], Mapping[tuple[str, str], _Class]]:
    """By instance and model, who runs, by SLO class and token class. An overview tells how many of a group run, and they run where it is or
    was."""
    found: dict[tuple[str, str], dict[tuple[str, str], _Class]] = {}
    for record in overview.groups.values():
        count = record.live - record.waiting
        if count > 0:
            meta = record.meta
            classes = found.setdefault((record.instance or record.last_instance, meta.get("model", "")), {})
            key = (meta.get("slo_class", ""), meta.get("token_class", ""))
            band, deadline_s = _band(meta), _deadline_s(record)
            before = classes.get(key)
            if before is None:
                classes[key] = _Class(count, band, deadline_s, [record.group_id])
            else:
                before.count += count
                before.band, before.deadline_s = min((before.band, before.deadline_s), (band, deadline_s))
                before.group_ids.append(record.group_id)
    return found


def _views_of(classes: Mapping[tuple[str, str], _Class], running: int, told: RunsTold | None, now_s: float) -> tuple[RunningView, ...]:
    """As many as the instance says that it runs: a group that moved while some of it ran counts them where it is now."""
    kept: list[RunningView] = []
    made = 0 if told is None else told.made_since(now_s)
    for (slo_class, token_class), each in classes.items():
        count = min(each.count, running)
        if count:
            view = RunningView(slo_class=slo_class, token_class=token_class, count=count, band=each.band, deadline_s=each.deadline_s)
            kept.append(
                view if told is None else with_reported_outputs(view, [told.groups.get(group_id) for group_id in each.group_ids], made)
            )
            running -= count
    return tuple(kept)


def group_view(record: GroupRecord) -> GroupView:
    """A group by its record; the meta keys are those of `GroupPlacement.meta` as the planner writes them."""
    meta = record.meta
    kind = meta.get("slo_kind", "")
    return GroupView(
        group_id=record.group_id,
        model=meta.get("model", ""),
        slo_kind=SloKind(kind) if kind in _SLO_KINDS else SloKind.COMPLETION,
        slo_class=meta.get("slo_class", ""),
        token_class=meta.get("token_class", ""),
        waiting=record.waiting,
        waiting_prompt_tokens=record.waiting_prompt_tokens,
        first_deadline_s=math.inf if kind == SloKind.PRIORITY else record.next_deadline_s,
        last_deadline_s=record.last_deadline_s,
        band=_band(meta),
    )


def _deadline_s(record: GroupRecord) -> float:
    return math.inf if record.meta.get("slo_kind") == SloKind.PRIORITY else record.first_deadline_s


def _band(meta: Mapping[str, str]) -> int:
    """The priority band that the planner wrote; 0 in a record of a version that wrote none, and in one that is damaged."""
    try:
        return int(meta.get("band", meta.get("priority", "0")))
    except ValueError:
        return 0
