"""Performs the machine's calls on the queue, and converts the answers to its events. No policy here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import assert_never

import structlog
from google.protobuf.message import DecodeError

from qlm.api.v1 import request_pb2
from qlm.internal.v1 import events_pb2
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.request import RequestFacts, Slo, SloKind
from qlm_core.vocabulary.slo_rules import SLO_KINDS
from qlm_core.vocabulary.stream import entry_id_of
from qlm_planner.board.snapshot import Arrival, InstanceRow, QueueRow, Snapshot
from qlm_planner.machine import effects, events
from qlm_process.wire import running as running_wire
from qlm_process.wire import waits as waits_wire
from qlm_process.wire.instance import from_body
from qlm_process.wire.lengths import predicted_output_tokens
from qlm_queue import values
from qlm_queue.expired import EXPIRED_RESULT
from qlm_queue.overview import InstanceRecord, Overview
from qlm_queue.port import Queue

WAITING_PAGE = 250
"""Requests of a group in one read: their prompts occupy the server."""

LOST_TOO_OFTEN = request_pb2.Result(
    error=request_pb2.ResultError(reason="ATTEMPTS_EXHAUSTED", message="the agents that ran the request were lost, every time")
).SerializeToString()

SHED_RESULT = request_pb2.Result(
    error=request_pb2.ResultError(reason="SHED", message="the load is more than the instances serve in time, and it would have been late")
).SerializeToString()

CHANGES: Mapping[int, events.ChangeKind] = {
    events_pb2.EVENT_KIND_PULLED: events.ChangeKind.PULLED,
    events_pb2.EVENT_KIND_UNPULLED: events.ChangeKind.RETURNED,
    events_pb2.EVENT_KIND_REQUEUED: events.ChangeKind.RETURNED,
    events_pb2.EVENT_KIND_COMPLETED: events.ChangeKind.ENDED_RUNNING,
    events_pb2.EVENT_KIND_FAILED: events.ChangeKind.ENDED_RUNNING,
    events_pb2.EVENT_KIND_CANCELLED: events.ChangeKind.ENDED_RUNNING,
    events_pb2.EVENT_KIND_EXPIRED: events.ChangeKind.ENDED_RUNNING,
    events_pb2.EVENT_KIND_UNPLACED: events.ChangeKind.ENDED_WAITING,
}


async def perform(queue: Queue, lease: values.Lease, call: effects.Call) -> events.Event:
    """Performs one call. Raises Unavailable (`CallFailed` for the machine) and LeaseLost."""
    match call:
        case effects.Place():
            return await _place(queue, lease, call)
        case effects.ApplyChunk():
            return await _apply(queue, lease, call)
        case effects.ReadOverview(group_ids=group_ids):
            return events.OverviewRead(snapshot=snapshot_of(await queue.overview(group_ids), group_ids))
        case effects.ReadUnplaced(after=after, count=count):
            found = await queue.read_unplaced(after, count)
            return events.UnplacedRead(arrivals=await _readable(queue, found), read_to=found[-1].queue_id if found else "")
        case effects.ReadArrivals(count=count, block_s=block_s):
            return events.ArrivalsRead(arrivals=await _readable(queue, await queue.read_arrivals(block_s, count)))
        case effects.ReadEvents(after=after, count=count, block_s=block_s):
            return events.EventsRead(entries=event_entries(await queue.read_events(after, block_s, count)))
        case effects.Reclaim(incarnation=incarnation):
            return events.Reclaimed(incarnation=incarnation, count=await queue.reclaim(lease, incarnation, LOST_TOO_OFTEN))
        case effects.Expire():
            return events.ExpirySwept(count=await queue.expire(EXPIRED_RESULT))
        case effects.Shed(group_id=group_id, keep=keep, count=count, oldest=oldest):
            return events.ShedAnswered(count=await queue.shed(lease, group_id, keep, count, oldest, SHED_RESULT))
        case effects.Regroup():
            return await _regroup(queue, lease, call)
        case effects.Forget(instance=instance):
            await queue.forget_instance(lease, instance)
            return events.Forgotten()
        case effects.PublishWaits(waits=waits):
            await queue.publish_waits(lease, waits_wire.to_body(waits))
            return events.WaitsPublished()
        case _:
            assert_never(call)


async def _place(queue: Queue, lease: values.Lease, call: effects.Place) -> events.PlaceAnswered:
    of_group: dict[str, list[RequestFacts]] = {}
    for each in call.requests:
        of_group.setdefault(each.group_id, []).append(each.arrival.facts)
    groups = [_group_placement(group, of_group.get(group.group_id, ())) for group in call.groups]
    requests = [
        values.RequestPlacement(queue_id=each.arrival.facts.queue_id, key=each.arrival.facts.key, group_id=each.group_id)
        for each in call.requests
    ]
    statuses = await queue.place(lease, groups, requests)
    return events.PlaceAnswered(call=call, done=tuple(status is values.StepStatus.DONE for status in statuses))


def _group_placement(group: effects.GroupOpening, requests: Sequence[RequestFacts]) -> values.GroupPlacement:
    """A group with the requests of a placement."""
    deadlines_s = [each.deadline_s for each in requests]
    return values.GroupPlacement(
        group_id=group.group_id,
        instance=group.instance,
        before=group.before,
        first_deadline_s=min([group.first_deadline_s, *deadlines_s]),
        meta=group.meta,
        last_deadline_s=max(deadlines_s, default=-math.inf),
        slo_least_s=min((each.slo.seconds for each in requests), default=math.inf),
    )


async def _apply(queue: Queue, lease: values.Lease, call: effects.ApplyChunk) -> events.ChunkAnswered:
    segments = [values.QueueSegment(instance=each.instance, start=each.start, group_ids=each.group_ids) for each in call.segments]
    answer = await queue.apply_plan(lease, values.PlanChunk(plan_version=call.plan_version, versions=call.versions, segments=segments))
    return events.ChunkAnswered(call=call, applied=answer.applied, versions=answer.versions, moved=answer.moved)


async def _regroup(queue: Queue, lease: values.Lease, call: effects.Regroup) -> events.Regrouped:
    """Moves requests to another group; requests that left the group since the read stay where they are."""
    found: list[values.LiveRequest] = []
    while len(found) < call.keep + call.count + WAITING_PAGE:  # the group may have grown
        page = await queue.waiting(call.source, found[-1].acceptance_number if found else 0, WAITING_PAGE)
        found.extend(page)
        if len(page) < WAITING_PAGE:
            break
    chosen = await _readable(queue, found[call.keep :][-call.count :])
    facts = [arrival.facts for arrival in chosen]
    into = _group_placement(call.into, facts)
    wanted = [values.WaitingRequest(queue_id=each.queue_id, key=each.key) for each in facts]
    statuses = await queue.regroup(lease, call.source, into, wanted) if wanted else []
    gone = [each for each, status in zip(facts, statuses, strict=True) if status is values.StepStatus.DONE]
    return events.Regrouped(
        call=call,
        count=len(gone),
        prompt_tokens=sum(each.prompt_tokens for each in gone),
        first_deadline_s=into.first_deadline_s,
        last_deadline_s=into.last_deadline_s,
    )


async def _readable(queue: Queue, requests: Sequence[values.LiveRequest]) -> tuple[Arrival, ...]:
    """Requests that can be placed. An unreadable one ends FAILED, so that it neither blocks others nor waits without end."""
    arrivals, unreadable = arrivals_of(requests)
    await queue.condemn(unreadable)
    return arrivals


def arrivals_of(requests: Sequence[values.LiveRequest]) -> tuple[tuple[Arrival, ...], list[str]]:
    """The readable requests, and the queue ids of the others."""
    found: list[Arrival] = []
    unreadable: list[str] = []
    for request in requests:
        try:
            found.append(arrival_of(request))
        except (DecodeError, ValueError) as error:
            structlog.get_logger().error("request_unreadable", queue_id=request.queue_id, error=str(error))
            unreadable.append(request.queue_id)
    return tuple(found), unreadable


def arrival_of(request: values.LiveRequest) -> Arrival:
    """Parses a request. Raises DecodeError and ValueError for a body that no gateway of this version stores."""
    body = request_pb2.Request.FromString(request.body)
    slo = body.admission.slo
    kind = SLO_KINDS.get(slo.kind)
    if kind is None or (kind is not SloKind.PRIORITY and not slo.seconds > 0):
        raise ValueError("admission.slo: missing or not positive")
    facts = RequestFacts(
        queue_id=request.queue_id,
        key=request.key,
        acceptance_number=request.acceptance_number,
        accepted_s=request.accepted_s,
        model=body.model,
        slo=Slo(kind=kind, priority=slo.priority) if kind is SloKind.PRIORITY else Slo(kind=kind, seconds=slo.seconds),
        prompt_tokens=body.admission.prompt_tokens,
        output_tokens_max=body.admission.output_tokens_max,
        predicted_output_tokens=predicted_output_tokens(body.admission),
    )
    return Arrival(facts=facts, traceparent=body.trace.traceparent, tracestate=body.trace.tracestate)


def event_entries(entries: Sequence[values.StreamEntry]) -> tuple[events.EventEntry, ...]:
    return tuple(events.EventEntry(entry_id=entry_id_of(entry.entry_id), changes=changes_of(entry.payload)) for entry in entries)


def changes_of(payload: bytes) -> tuple[events.Change, ...]:
    """Changes of groups by one script call; none for requests that were never placed."""
    changes: list[events.Change] = []
    try:
        found = events_pb2.RequestEvents.FromString(payload).events
    except DecodeError as error:  # the next overview corrects the counts
        structlog.get_logger().error("events_unreadable", bytes=len(payload), error=str(error))
        return ()
    for event in found:
        kind = CHANGES.get(event.kind)
        if kind is None or not event.group_id:
            continue
        if kind is events.ChangeKind.ENDED_RUNNING and not event.incarnation:
            kind = events.ChangeKind.ENDED_WAITING
        evicted = event.cause == values.RequeueCause.EVICTED.value
        changes.append(
            events.Change(
                kind=kind,
                group_id=event.group_id,
                incarnation=event.incarnation,
                prompt_tokens=event.prompt_tokens,
                evicted=evicted,
                answered=evicted or event.first_token_s > 0.0,  # an evicted request has output
            )
        )
    return tuple(changes)


def snapshot_of(overview: Overview, group_ids: tuple[str, ...] | None = None) -> Snapshot:
    """The overview as a snapshot. `group_ids`: of the call, None for all."""
    return Snapshot(
        plan_version=overview.plan_version,
        unplaced=overview.unplaced,
        queues=tuple(
            QueueRow(instance=queue.instance, version=queue.version, group_ids=tuple(queue.group_ids), running=queue.running)
            for queue in overview.virtual_queues
        ),
        groups=overview.groups,
        instances=tuple(instance_row(record) for record in overview.instances),
        incarnations=overview.incarnations,
        last_event_id=entry_id_of(overview.last_event_id),
        group_ids=group_ids,
        pauses=tuple(overview.pauses),
    )


def instance_row(record: InstanceRecord) -> InstanceRow:
    """Parses a registered instance. One with an unreadable record has no models, so its groups are moved."""
    try:
        facts = from_body(record.body, record.incarnation)
    except ValueError as error:
        structlog.get_logger().error("instance_unreadable", instance=record.name, error=str(error))
        facts = InstanceFacts(name=record.name, incarnation=record.incarnation, gpu="", n_gpu=1, engine="", models=())
    return InstanceRow(facts=facts, alive=record.alive, runs=running_wire.from_body(record.body))
