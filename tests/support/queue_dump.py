"""`QueueDump`: the whole logical state of one queue, made of either implementation (`queue_dump_memory`, `queue_dump_redis`): the
conformance suite compares them.

A dump holds what is stored, as it is stored: queue ids as they are, protobuf messages as bytes. `canonical` then replaces queue ids by
acceptance numbers, takes the times out and gives plain dicts, so that two dumps of equal histories are equal.

A dump is not atomic and not bounded: take it only while nothing else uses the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from google.protobuf import json_format
from google.protobuf.message import Message

from qlm.api.v1.request_pb2 import Result
from qlm.internal.v1.events_pb2 import RequestEvents
from qlm.internal.v1.frames_pb2 import FrameBatch
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.values import ControlEntry, ControlKind

Numbering = Callable[[str], str]
"""Names a queue id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDump:
    """A live request. `incarnation`: its owner, "" unless RUNNING. `group_id`: "" while ACCEPTED; kept while RUNNING. `slo_class`: the
    class it is counted under. `progress`, `logprobs`: all output so far, b"" for none. `expires`: it is in the expiry index. `model`: that
    of its body."""

    queue_id: str
    key: RequestKey
    acceptance_number: int
    state: RequestState
    digest: bytes
    body: bytes
    model: str
    slo_class: str
    prompt_tokens: int
    group_id: str
    incarnation: str
    attempt: int
    failed_attempts: int
    gateway: str
    progress: bytes
    logprobs: bytes
    expires: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDump:
    """A group that has a record (live requests). `members`: queue ids of its waiting (PLACED) requests, by acceptance number. `live`: the
    counter of its requests that are not terminal, waiting or running. `instance`: the virtual queue it is open on, "" for none;
    `last_instance`: the one it is or was on last. `waiting_prompt_tokens`, `first_deadline_s`, `last_deadline_s`,
    `slo_least_s` and `meta` as in `GroupRecord`."""

    group_id: str
    members: tuple[str, ...]
    live: int
    instance: str
    last_instance: str
    waiting_prompt_tokens: int
    first_deadline_s: float
    last_deadline_s: float
    slo_least_s: float
    meta: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualQueueDump:
    """The queue of a registered instance, or "unassigned", which always exists (version 0 and empty at first)."""

    instance: str
    version: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDump:
    """A registered instance, its lease alive or not. `incarnation`: the last one registered."""

    name: str
    incarnation: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalDump:
    """A stored end of a request: the fields of its `TerminalRecord`."""

    key: RequestKey
    state: RequestState
    digest: bytes
    queue_id: str
    attempt: int
    result: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDump:
    """All of a queue. Mappings hold no empty values: a set, stream or counter that is empty or zero is left out.

    accepted_count    the acceptance counter
    plan_version      of the last applied chunk, 0 at first
    requests          live requests, by acceptance number
    groups            all groups with a record, open or not, by id
    virtual_queues    by instance name, "unassigned" among them
    running           incarnation -> queue ids that its running set holds, in any order
    incarnations      those that may own requests: registered and not yet forgotten by `deregister` or `reclaim`; sorted
    instances         by name
    leases            role or incarnation -> (token, address) of every lease that is alive now; address "" for an incarnation
    live_total        the counter of live requests, as stored (not counted from `requests`)
    live_by_tenant, live_by_class   the counters that `tenant_max` and `class_max` bound, as stored
    held_total, held_by_tenant, held_by_class   the counters of bytes, as stored
    kept              queue id -> (tenant, SLO class, bytes) of each counted result
    arrivals_pending  queue ids of the consumer group's pending entries, as they are there, in order
    arrivals_unread   queue ids of ACCEPTED requests that `read_arrivals` has not given to any planner, in order
    terminals         results in their window, by key
    frames            gateway -> the FrameBatch of each stream entry, in order
    control           instance -> the entries of its control stream, in order
    events            the RequestEvents of each entry of the events stream, in order
    profiles          version and body, (0, b"") for none
    waits             as published, b"" for none
    """

    accepted_count: int
    plan_version: int
    requests: tuple[RequestDump, ...]
    groups: tuple[GroupDump, ...]
    virtual_queues: tuple[VirtualQueueDump, ...]
    running: Mapping[str, tuple[str, ...]]
    incarnations: tuple[str, ...]
    instances: tuple[InstanceDump, ...]
    leases: Mapping[str, tuple[str, str]]
    live_total: int
    live_by_tenant: Mapping[str, int]
    live_by_class: Mapping[str, int]
    held_total: int
    held_by_tenant: Mapping[str, int]
    held_by_class: Mapping[str, int]
    kept: Mapping[str, tuple[str, str, int]]
    arrivals_pending: tuple[str, ...]
    arrivals_unread: tuple[str, ...]
    terminals: tuple[TerminalDump, ...]
    frames: Mapping[str, tuple[bytes, ...]]
    control: Mapping[str, tuple[ControlEntry, ...]]
    events: tuple[bytes, ...]
    profiles: tuple[int, bytes]
    waits: bytes


def canonical(dump: QueueDump, numbers: Mapping[str, int]) -> dict[str, object]:
    """A dump as plain values that are equal for equal histories: queue ids as "#<acceptance number>" (`numbers` knows those of requests
    that have ended), messages as dicts without times, frames and events without the borders between their entries, and only the first
    of several WAKE (or HEAD_CHANGED) in a row."""
    known = {**numbers, **{request.queue_id: request.acceptance_number for request in dump.requests}}

    def number(queue_id: str) -> str:
        return f"#{known[queue_id]}" if queue_id in known else f"?{queue_id}"

    return {
        "accepted_count": dump.accepted_count,
        "plan_version": dump.plan_version,
        "requests": {number(request.queue_id): _request(request) for request in dump.requests},
        "groups": {
            group.group_id: {**asdict(group), "members": list(map(number, group.members)), "meta": dict(sorted(group.meta.items()))}
            for group in dump.groups
        },
        "virtual_queues": {queue.instance: (queue.version, list(queue.group_ids)) for queue in dump.virtual_queues},
        "running": {name: sorted(map(number, queue_ids)) for name, queue_ids in sorted(dump.running.items())},
        "incarnations": sorted(dump.incarnations),
        "instances": {record.name: (record.incarnation, record.body) for record in dump.instances},
        "leases": dict(sorted(dump.leases.items())),
        "live": {"total": dump.live_total, "tenant": dict(dump.live_by_tenant), "class": dict(dump.live_by_class)},
        "held": {"total": dump.held_total, "tenant": dict(dump.held_by_tenant), "class": dict(dump.held_by_class)},
        "kept": {number(queue_id): kept for queue_id, kept in dump.kept.items()},
        "arrivals_pending": sorted(map(number, dump.arrivals_pending)),
        "arrivals_unread": [number(queue_id) for queue_id in dump.arrivals_unread],
        "terminals": {
            record.key: (record.state, record.digest, number(record.queue_id), record.attempt, result_values(record.result, number))
            for record in dump.terminals
        },
        "frames": {gateway: frame_values(batches, number) for gateway, batches in sorted(dump.frames.items())},
        "control": {name: _control(entries, number) for name, entries in sorted(dump.control.items())},
        "events": event_values(dump.events, number),
        "profiles": dump.profiles,
        "waits": dump.waits,
    }


def differences(left: object, right: object, where: str = "") -> list[str]:
    """Lists the differences between two canonical dumps, one line a place."""
    if isinstance(left, dict) and isinstance(right, dict):
        names = sorted({*left, *right}, key=str)
        missing = object()
        return [line for name in names for line in differences(left.get(name, missing), right.get(name, missing), f"{where}/{name}")]
    return [] if left == right else [f"{where}: {left!r} != {right!r}"]


def result_values(result: bytes, number: Numbering) -> dict[str, object]:
    """A serialized Result as a dict without its times."""
    message = Result.FromString(result)
    message.ClearField("timing")
    message.queue_id = number(message.queue_id)
    return _values(message)


def frame_values(batches: Iterable[bytes], number: Numbering) -> list[dict[str, object]]:
    """The frames of serialized FrameBatches as dicts without times."""
    values = []
    for batch in batches:
        for frame in FrameBatch.FromString(batch).frames:
            frame.queue_id = number(frame.queue_id)
            if frame.HasField("result"):
                frame.result.ClearField("timing")
                frame.result.queue_id = number(frame.result.queue_id)
            values.append(_values(frame))
    return values


def event_values(entries: Iterable[bytes], number: Numbering) -> list[dict[str, object]]:
    """The events of serialized RequestEvents as dicts without the time of acceptance; of that of the first token, whether there is one."""
    values = []
    for entry in entries:
        for event in RequestEvents.FromString(entry).events:
            event.ClearField("accepted_ms")
            event.first_token_s = float(event.first_token_s > 0.0)
            event.queue_id = number(event.queue_id)
            values.append(_values(event))
    return values


def _request(request: RequestDump) -> dict[str, object]:
    names = (name for name in RequestDump.__slots__ if name not in ("queue_id", "acceptance_number"))
    return {name: getattr(request, name) for name in names}


def _control(entries: Iterable[ControlEntry], number: Numbering) -> list[tuple[str, str, int]]:
    values: list[tuple[str, str, int]] = []
    for entry in entries:
        value = (entry.kind.value, number(entry.queue_id) if entry.queue_id else "", entry.attempt)
        if entry.kind not in (ControlKind.WAKE, ControlKind.HEAD_CHANGED) or values[-1:] != [value]:
            values.append(value)
    return values


def _values(message: Message) -> dict[str, object]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)
