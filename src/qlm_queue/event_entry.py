"""Events that a caller of the queue writes itself."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from qlm.internal.v1.events_pb2 import RequestEvent, RequestEvents


def events_entry(events: Sequence[bytes]) -> bytes:
    """Serialized RequestEvents of these serialized events. Raises ValueError for bytes that are no RequestEvent."""
    try:
        return RequestEvents(events=map(RequestEvent.FromString, events)).SerializeToString()
    except DecodeError as error:
        raise ValueError(f"not a RequestEvent: {error}") from error
