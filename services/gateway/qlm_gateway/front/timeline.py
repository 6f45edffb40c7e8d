"""The life of one request as moments: from the queue's record of it, and from the lifecycle events that the queue still keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from qlm.api.v1.request_pb2 import Result
from qlm.internal.v1.events_pb2 import EventKind, RequestEvent, RequestEvents
from qlm_core.vocabulary.instance import instance_of
from qlm_core.vocabulary.request import RequestKey
from qlm_queue.port import Queue
from qlm_queue.values import LiveRequest, StreamEntry, TerminalRecord

EVENTS_AT_ONCE = 500
"""Entries of the event stream that one call of the queue reads: it holds the server for less than a millisecond."""
CALLS_MAX = 4
"""Calls of the queue for one page of a timeline."""

_NAMES = {
    EventKind.EVENT_KIND_PULLED: "pulled",
    EventKind.EVENT_KIND_UNPULLED: "given back unstarted",
    EventKind.EVENT_KIND_KV_OFFLOADED: "KV to host memory",
    EventKind.EVENT_KIND_KV_RESTORED: "KV back on the GPU",
    EventKind.EVENT_KIND_PREDICTED: "predicted",
    EventKind.EVENT_KIND_UNPLACED: "unplaced by a pause",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """`at_s`: seconds of the queue's clock. `instance`, `attempt`: where they say something, else "" and 0. `wait_p50_s`, `end_p50_s`: of
    `predicted`, seconds from acceptance; None elsewhere."""

    at_s: float
    what: str
    instance: str = ""
    attempt: int = 0
    wait_p50_s: float | None = None
    end_p50_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePage:
    """A part of a timeline. `recorded`: moments that the request's record has now. `events`: those of this page. `position`: the entry
    behind which the next page begins; `more`: there is one now. `accepted_seen`: its acceptance was among the events, so that no earlier
    event of it is missing."""

    recorded: tuple[Moment, ...]
    events: tuple[Moment, ...]
    position: str
    more: bool
    accepted_seen: bool


async def timeline_page(queue: Queue, key: RequestKey, after: str) -> TimelinePage:
    """The page behind an entry of the event stream ("": the first one). It reads at most CALLS_MAX * EVENTS_AT_ONCE entries. Raises
    NotFound, Unavailable."""
    found = await queue.find(key)
    moments, accepted_seen = list[Moment](), False
    last_s = Result.FromString(found.result).timing.finished_s if isinstance(found, TerminalRecord) else None
    position, more = after or before_acceptance(found.queue_id), True
    for _ in range(CALLS_MAX):
        entries = await queue.read_events(position, 0.0, EVENTS_AT_ONCE)
        for entry in entries:
            seen, accepted = moments_of(entry, found.queue_id)
            moments += seen
            accepted_seen |= accepted
        if entries:
            position = entries[-1].entry_id
        if len(entries) < EVENTS_AT_ONCE or (last_s is not None and entry_s(position) > last_s + 1.0):
            more = False
            break
    return TimelinePage(recorded=recorded_moments(found), events=tuple(moments), position=position, more=more, accepted_seen=accepted_seen)


def recorded_moments(found: LiveRequest | TerminalRecord) -> tuple[Moment, ...]:
    """Moments that the queue keeps with the request itself: its acceptance, last placement, first pull, first token and end."""
    if isinstance(found, LiveRequest):
        times = {
            "accepted": found.accepted_s,
            "placed": found.placed_s,
            "first pull": found.started_s,
            "first token": found.first_token_s,
        }
    else:
        timing = Result.FromString(found.result).timing
        times = {
            "accepted": timing.accepted_s,
            "placed": timing.placed_s,
            "first pull": timing.started_s,
            "first token": timing.first_token_s,
            found.state.name.lower(): timing.finished_s,
        }
    return tuple(Moment(at_s=at_s, what=what) for what, at_s in times.items() if at_s)


def moments_of(entry: StreamEntry, queue_id: str) -> tuple[list[Moment], bool]:
    """The moments of a request in an entry of the event stream, and whether its acceptance is among them. An entry that cannot be read
    has none."""
    if queue_id.encode() not in entry.payload:  # as most have not: a hundredth of what reading it costs
        return [], False
    try:
        events: Iterable[RequestEvent] = RequestEvents.FromString(entry.payload).events
    except DecodeError:
        return [], False
    own = [event for event in events if event.queue_id == queue_id]
    at_s = entry_s(entry.entry_id)
    moments = [_moment(event, at_s) for event in own if event.kind in _NAMES or event.kind == EventKind.EVENT_KIND_REQUEUED]
    return moments, any(event.kind == EventKind.EVENT_KIND_ACCEPTED for event in own)


def before_acceptance(queue_id: str) -> str:
    """The last id of the event stream that is before the acceptance of a request: both are milliseconds of the server's clock."""
    return f"{int(queue_id.partition('-')[0]) - 1}-0"


def entry_s(entry_id: str) -> float:
    return int(entry_id.partition("-")[0]) / 1000


def _moment(event: RequestEvent, at_s: float) -> Moment:
    predicted = event.kind == EventKind.EVENT_KIND_PREDICTED
    requeued = event.kind == EventKind.EVENT_KIND_REQUEUED
    return Moment(
        at_s=at_s,
        what=f"requeued: {event.cause}" if requeued else _NAMES[event.kind],
        instance=event.instance or instance_of(event.incarnation),
        attempt=event.attempt,
        wait_p50_s=event.predicted_wait_p50_s if predicted and event.HasField("predicted_wait_p50_s") else None,
        end_p50_s=event.predicted_p50_s if predicted else None,
    )
