"""Reads of a `MemoryState`. Only `arrivals` changes something: what was read is not read again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from qlm.api.v1.request_pb2 import Request
from qlm_core.vocabulary.pauses import Pause
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.memory.admission import not_found
from qlm_queue.memory.state import MemoryState, StoredGroup, StreamId, parse_id
from qlm_queue.operator_values import PAGE_BYTES_MAX, LivePage
from qlm_queue.overview import InstanceRecord, Overview, VirtualQueueRecord
from qlm_queue.values import BATCH_MAX, ControlEntry, GroupRecord, LiveRequest, StreamEntry


def frames(state: MemoryState, now_s: float, gateway: str, after: StreamId, count: int) -> list[StreamEntry]:
    stream = state.frames_of(gateway, now_s)
    found = [] if stream is None else stream.after(after, count)
    return [StreamEntry(entry_id=entry_id, payload=payload) for entry_id, payload in found]


def control(state: MemoryState, instance: str, after: StreamId, count: int) -> list[tuple[str, ControlEntry]]:
    stream = state.control.get(instance)
    return [] if stream is None else stream.after(after, count)


def events(state: MemoryState, after: StreamId, count: int) -> list[StreamEntry]:
    return [StreamEntry(entry_id=entry_id, payload=payload) for entry_id, payload in state.events.after(after, count)]


def arrivals(state: MemoryState, count: int) -> list[LiveRequest]:
    found: list[LiveRequest] = []
    while state.unread and len(found) < count:
        request = state.requests.get(state.unread.popleft())
        if request is not None:
            request.read = True
            if request.queue_id in state.unplaced:
                found.append(request.as_live())
    return found


def unplaced(state: MemoryState, after: str, count: int) -> list[LiveRequest]:
    start = parse_id(after) if after else (-1, 0)
    later = (request for request in state.unplaced_in_order() if parse_id(request.queue_id) > start)
    return [request.as_live() for request in islice(later, count)]


def live_requests(state: MemoryState, after: str, count: int) -> LivePage:
    start = parse_id(after) if after else (-1, 0)
    found: list[LiveRequest] = []
    size = 0
    for queue_id, request in state.requests.items():
        if parse_id(queue_id) > start:
            found.append(replace(request.as_live(), body=_without_prompt(request.body)))
            size += len(request.body)
            if len(found) == count or size >= PAGE_BYTES_MAX:
                return LivePage(after=queue_id, requests=found)
    return LivePage(after="", requests=found)


def _without_prompt(body: bytes) -> bytes:
    request = Request.FromString(body)
    kept = Request(model=request.model)
    if request.HasField("admission"):
        kept.admission.CopyFrom(request.admission)
    return kept.SerializeToString()


def requests_ahead(state: MemoryState, key: RequestKey) -> tuple[str, int]:
    request = state.by_key.get(key)
    if request is None and key not in state.terminals:
        raise not_found(key)
    if request is None or request.state is not RequestState.PLACED:
        return "", 0
    group = state.groups[request.group_id]
    ahead = 0
    for group_id in state.queues[group.instance].group_ids[:BATCH_MAX]:
        if group_id == group.group_id:
            return group.instance, ahead + bisect_left(group.members, request.number)
        ahead += len(state.groups[group_id].members)
    return group.instance, ahead


def waiting(state: MemoryState, group_id: str, after: int, count: int) -> list[LiveRequest]:
    group = state.groups.get(group_id)
    if group is None:
        return []
    first = bisect_right(group.members, after)
    return [state.by_number[number].as_live() for number in group.members[first : first + count]]


def overview(state: MemoryState, now_s: float, group_ids: Sequence[str] | None = None) -> Overview:
    if group_ids is not None and len(group_ids) > BATCH_MAX:
        raise ValueError(f"one call touches at most {BATCH_MAX} ids, not {len(group_ids)}")
    chosen = sorted(state.groups if group_ids is None else {group_id for group_id in group_ids if group_id in state.groups})
    return Overview(
        plan_version=state.plan_version,
        accepted_count=state.accepted_count,
        live=len(state.requests),
        unplaced=len(state.unplaced),
        virtual_queues=[
            VirtualQueueRecord(instance=name, version=queue.version, group_ids=tuple(queue.group_ids), running=_running(state, name))
            for name, queue in sorted(state.queues.items())
        ],
        groups={group_id: _group_record(state, state.groups[group_id]) for group_id in chosen},
        instances=[
            InstanceRecord(
                name=name,
                incarnation=registered.incarnation,
                alive=state.holder(registered.incarnation, now_s) is not None,
                body=registered.body,
            )
            for name, registered in sorted(state.instances.items())
        ],
        incarnations={name: state.holder(name, now_s) is not None for name in sorted(state.running)},
        last_event_id=f"{state.events.last_id[0]}-{state.events.last_id[1]}",
        damage_count=state.damage_count,
        pauses=pauses(state),
    )


def pauses(state: MemoryState) -> list[Pause]:
    return [Pause(kind=kind, name=name, since_s=since_s) for (kind, name), since_s in sorted(state.paused.items())]


def _running(state: MemoryState, instance: str) -> int:
    registered = state.instances.get(instance)
    return 0 if registered is None else len(state.running.get(registered.incarnation, {}))


def _group_record(state: MemoryState, group: StoredGroup) -> GroupRecord:
    return GroupRecord(
        group_id=group.group_id,
        instance=group.instance,
        last_instance=group.last_instance,
        waiting=len(group.members),
        live=group.live,
        waiting_prompt_tokens=group.waiting_prompt_tokens,
        first_deadline_s=group.first_deadline_s,
        next_deadline_s=state.next_deadline_s(group),
        last_deadline_s=max(group.first_deadline_s, group.last_deadline_s),
        meta=group.meta,
        slo_least_s=group.slo_least_s,
    )
