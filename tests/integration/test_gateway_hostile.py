"""Every RPC of the Gateway service against hostile requests: a valid answer, or a canonical error with a reason that changed nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from qlm.api.v1 import gateway_pb2, request_pb2
from qlm.api.v1.errors_pb2 import ErrorReason
from qlm.errors import InternalError, QlmError
from qlm.wire_errors import from_rpc_error, status_code

from .gateway_rig import MODEL, Rig, open_rig
from .hostile_values import Hostile, hostile_requests

SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"]
SILENCE_S = 0.3
"""A stream or a wait that says nothing for so long was accepted."""
KEY = {"tenant": "default", "request_id": "base"}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as opened:
        yield opened


def good_request(method: str) -> Message:
    """A request that is answered well, with many fields set."""
    request = request_pb2.Request(
        model=MODEL,
        tokens=request_pb2.TokenPrompt(ids=[1, 2, 3]),
        sampling=request_pb2.SamplingParams(max_tokens=5, temperature=0.5, stop=["end"]),
        slo=request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=20.0),
        tenant="default",
    )
    if method in ("Generate", "Submit"):
        return GetMessageClass(SERVICE.methods_by_name[method].input_type)(request=request)
    if method == "ListModels":
        return gateway_pb2.ListModelsRequest()
    return GetMessageClass(SERVICE.methods_by_name[method].input_type)(**KEY)


async def call(channel: grpc.aio.Channel, method: MethodDescriptor, payload: bytes) -> Message | None:
    """The first answer, or None where the call was taken and is silent. Raises QlmError."""
    path = f"/{SERVICE.full_name}/{method.name}"
    parse = GetMessageClass(method.output_type).FromString
    try:
        if not method.server_streaming:
            unary = channel.unary_unary(path, request_serializer=None, response_deserializer=parse)
            answer: Message = await unary(payload, timeout=SILENCE_S if method.name == "Result" else 5.0)
            return answer
        stream = channel.unary_stream(path, request_serializer=None, response_deserializer=parse)(payload, timeout=5.0)
        try:
            async with asyncio.timeout(SILENCE_S):
                first = await stream.read()
                return first if isinstance(first, Message) else None
        except TimeoutError:
            return None
        finally:
            stream.cancel()
    except grpc.RpcError as failure:
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED and method.name == "Result":
            return None
        raise from_rpc_error(failure) from failure


def check_error(error: QlmError, hostile: Hostile) -> None:
    assert type(error) is not QlmError, f"{hostile.what}: unknown reason {error.reason}"
    assert not isinstance(error, InternalError), f"{hostile.what}: {error.message}"
    assert f"ERROR_REASON_{error.reason}" in ErrorReason.keys(), f"{hostile.what}: {error.reason}"  # noqa: SIM118
    assert status_code(error) not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), hostile.what
    if error.reason == "INVALID_FIELD":
        assert error.details["field"], hostile.what
        assert error.details["rule"], hostile.what


@pytest.mark.parametrize("name", [method.name for method in SERVICE.methods])
async def test_hostile_requests_are_answered_or_refused_and_change_nothing(rig: Rig, name: str) -> None:
    gateway = await rig.gateway()
    method = SERVICE.methods_by_name[name]
    answered = refused = 0
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        base = gateway_pb2.SubmitRequest(request=good_request("Submit").request)  # type: ignore[attr-defined]
        base.request.request_id = "base"
        await call(channel, SERVICE.methods_by_name["Submit"], base.SerializeToString())
        for hostile in hostile_requests(good_request(name)):
            before = await rig.queue.dump()
            try:
                await call(channel, method, hostile.payload)
            except QlmError as error:
                check_error(error, hostile)
                assert await rig.queue.dump() == before, f"{hostile.what} changed the queue"
                refused += 1
            else:
                answered += 1
    assert refused > 10
    assert answered > 0


async def test_the_gateway_serves_after_all_of_it(rig: Rig) -> None:
    gateway = await rig.gateway()
    rig.serve()
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        generate = SERVICE.methods_by_name["Generate"]
        for hostile in list(hostile_requests(good_request("Generate")))[::7]:
            try:
                await call(channel, generate, hostile.payload)
            except QlmError as error:
                check_error(error, hostile)
        answer = await call(channel, generate, good_request("Generate").SerializeToString())
        assert isinstance(answer, gateway_pb2.StreamResponse)
        assert answer.HasField("accepted")
