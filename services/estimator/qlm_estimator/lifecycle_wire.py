"""From an entry of the event stream to what the machine learns from and what outcomes count."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import DecodeError

from qlm.field_copies import value_of
from qlm.internal.v1 import events_pb2
from qlm_core.statistics.length_model import LengthGuess
from qlm_core.vocabulary.stream import EntryId, entry_id_of
from qlm_estimator.events import Event, Lifecycle, LifecycleKind, OperationKind, ReportedOperation
from qlm_estimator.outcomes.report import Outcomes
from qlm_estimator.outcomes.wire import take
from qlm_process.wire import lengths as length_wire
from qlm_queue.values import StreamEntry

_KINDS = {
    events_pb2.EVENT_KIND_ACCEPTED: LifecycleKind.ACCEPTED,
    events_pb2.EVENT_KIND_PULLED: LifecycleKind.PULLED,
    events_pb2.EVENT_KIND_UNPULLED: LifecycleKind.RELEASED,
    events_pb2.EVENT_KIND_REQUEUED: LifecycleKind.RELEASED,
    events_pb2.EVENT_KIND_COMPLETED: LifecycleKind.COMPLETED,
    events_pb2.EVENT_KIND_FAILED: LifecycleKind.ENDED,
    events_pb2.EVENT_KIND_CANCELLED: LifecycleKind.ENDED,
    events_pb2.EVENT_KIND_EXPIRED: LifecycleKind.ENDED,
}
_OPERATIONS = {
    events_pb2.EVENT_KIND_MODEL_SWAPPED: OperationKind.SWAPPED_COLD,
    events_pb2.EVENT_KIND_MODEL_WARMED: OperationKind.WARMED,
    events_pb2.EVENT_KIND_KV_OFFLOADED: OperationKind.KV_MOVED,
    events_pb2.EVENT_KIND_KV_RESTORED: OperationKind.KV_MOVED,
}
"""Kinds that are in neither, of which a newer version may write some, teach nothing."""


def events_of(entry: StreamEntry, outcomes: Outcomes, classes: Mapping[str, str]) -> list[Event]:
    """The events of an entry that teach something, in order; all of them are counted in `outcomes`. `classes`: group id -> SLO class, for
    ends that do not name it. Raises ValueError where the entry is malformed."""
    try:
        message = events_pb2.RequestEvents.FromString(entry.payload)
    except DecodeError as error:
        raise ValueError(f"entry {entry.entry_id} is no RequestEvents message") from error
    entry_id = entry_id_of(entry.entry_id)
    found: list[Event] = []
    for index, event in enumerate(message.events):
        if event.kind in _KINDS:
            found.append(_lifecycle(entry_id, index, event))
        elif event.kind in _OPERATIONS and event.took_s != 0.0:
            found.append(_operation(entry_id, index, event))
        taken = take(outcomes, event, entry_id[0] / 1000.0, classes)
        if taken is not None:
            found.append(taken)
    return found


def _lifecycle(entry_id: EntryId, index: int, event: events_pb2.RequestEvent) -> Lifecycle:
    started, guess = event.kind != events_pb2.EVENT_KIND_UNPULLED, _guess(event)
    return value_of(Lifecycle, event, kind=_KINDS[event.kind], entry_id=entry_id, index=index, started=started, length_guess=guess)


def _operation(entry_id: EntryId, index: int, event: events_pb2.RequestEvent) -> ReportedOperation:
    from_warm = event.kind == events_pb2.EVENT_KIND_MODEL_SWAPPED and event.from_warm
    kind = OperationKind.SWAPPED_WARM if from_warm else _OPERATIONS[event.kind]
    requests, tokens = event.moved_requests, event.moved_tokens
    return value_of(ReportedOperation, event, kind=kind, entry_id=entry_id, index=index, requests=requests, tokens=tokens)


def _guess(event: events_pb2.RequestEvent) -> LengthGuess | None:
    """None where there is none, or an invalid one: the rest of the event counts all the same."""
    if not event.HasField("length_guess"):
        return None
    try:
        return length_wire.guess_from_proto(event.length_guess)
    except ValueError:
        return None
