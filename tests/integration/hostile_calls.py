"""Calls of any RPC with bytes for a request, and what an error of any service has to look like."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from qlm.api.v1 import instance_pb2
from qlm.api.v1.errors_pb2 import ErrorReason
from qlm.errors import InternalError, QlmError
from qlm.internal.v1 import events_pb2
from qlm.wire_errors import from_rpc_error, status_code
from qlm_core.vocabulary.errors import Unavailable
from queue_dump import QueueDump

from .hostile_values import Hostile, hostile_requests

SILENCE_S = 0.3
"""A stream or a wait that says nothing for so long was accepted."""
CALL_S = 20.0
SETTLE_LOOKS_MAX = 200
LOOKS_MAX = 3
REPORTED_KINDS = frozenset(
    {
        events_pb2.EVENT_KIND_MODEL_SWAPPED,
        events_pb2.EVENT_KIND_MODEL_WARMED,
        events_pb2.EVENT_KIND_KV_OFFLOADED,
        events_pb2.EVENT_KIND_KV_RESTORED,
        events_pb2.EVENT_KIND_PREDICTED,
    }
)


@dataclass
class Tally:
    answered: int = 0
    refused: int = 0


async def call(channel: grpc.aio.Channel, method: MethodDescriptor, payload: bytes, *, waits: bool = False) -> Message | None:
    """The first answer, or None where the call was taken and is silent. `waits`: the RPC waits on purpose. Raises QlmError."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    parse = GetMessageClass(method.output_type).FromString
    try:
        if not method.server_streaming:
            unary = channel.unary_unary(path, request_serializer=None, response_deserializer=parse)
            answer: Message = await unary(payload, timeout=SILENCE_S if waits else CALL_S)
            return answer
        stream = channel.unary_stream(path, request_serializer=None, response_deserializer=parse)(payload, timeout=CALL_S)
        try:
            async with asyncio.timeout(SILENCE_S):
                first = await stream.read()
                return first if isinstance(first, Message) else None
        except TimeoutError:
            return None
        finally:
            stream.cancel()
    except grpc.RpcError as failure:
        if waits and failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return None
        raise from_rpc_error(failure) from failure


def check_error(error: QlmError, hostile: Hostile) -> None:
    """A canonical code, a reason of the table, and the field where it is a field's fault."""
    assert type(error) is not QlmError, f"{hostile.what}: unknown reason {error.reason}"
    assert not isinstance(error, InternalError), f"{hostile.what}: {error.message}"
    assert f"ERROR_REASON_{error.reason}" in ErrorReason.keys(), f"{hostile.what}: {error.reason}"  # noqa: SIM118
    assert status_code(error) not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), hostile.what
    if error.reason == "INVALID_FIELD":
        assert error.details["field"], hostile.what
        assert error.details["rule"], hostile.what


async def looked_at(dump: Callable[[], Awaitable[QueueDump]]) -> QueueDump:
    """The queue without the state that services write in their own time: events of `Queue.report`, models and runs of agents, waits of the
    plan. No call is to blame for those. On a machine that stands still for seconds the read is repeated."""
    for _ in range(LOOKS_MAX - 1):
        try:
            return without_reports(await dump())
        except Unavailable:
            continue
    return without_reports(await dump())


def without_reports(state: QueueDump) -> QueueDump:
    return replace(
        state,
        waits=b"",
        events=tuple(entry for entry in state.events if not _is_report(entry)),
        instances=tuple(replace(instance, body=_without_state(instance.body)) for instance in state.instances),
    )


def _without_state(body: bytes) -> bytes:
    facts = instance_pb2.Instance.FromString(body)
    for name in ("active_model", "warm_models", "loading_since_s", "running", "running_reported_s", "token_s", "batch"):
        facts.ClearField(name)
    return facts.SerializeToString(deterministic=True)


def _is_report(entry: bytes) -> bool:
    return all(event.kind in REPORTED_KINDS for event in events_pb2.RequestEvents.FromString(entry).events)


async def settled(dump: Callable[[], Awaitable[QueueDump]]) -> QueueDump:
    """The queue's state once two looks agree: what earlier calls began has ended."""
    last = await looked_at(dump)
    for _ in range(SETTLE_LOOKS_MAX):
        now = await looked_at(dump)
        if now == last:
            return now
        last = now
    raise AssertionError(f"the queue still changes after {SETTLE_LOOKS_MAX} looks")


async def call_with_all(
    channel: grpc.aio.Channel, method: MethodDescriptor, good: Message, dump: Callable[[], Awaitable[QueueDump]], *, waits: bool = False
) -> Tally:
    """Every hostile variant of a good request: answered, or refused with a typed error that changed nothing."""
    tally = Tally()
    for hostile in hostile_requests(good):
        before = await settled(dump)
        try:
            await call(channel, method, hostile.payload, waits=waits)
        except QlmError as error:
            check_error(error, hostile)
            assert await looked_at(dump) == before, f"{hostile.what} changed the queue"
            tally.refused += 1
        else:
            tally.answered += 1
    return tally
