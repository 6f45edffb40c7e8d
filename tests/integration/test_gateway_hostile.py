"""Every RPC of the Gateway service against hostile requests: a valid answer, or a canonical error with a reason that changed nothing."""

from __future__ import annotations

from functools import partial

import grpc.aio
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from qlm.api.v1 import gateway_pb2, request_pb2
from qlm.errors import QlmError
from queue_dump_redis import dump_redis

from .gateway_rig import MODEL, Rig
from .hostile_calls import call, call_with_all, check_error
from .hostile_values import hostile_requests

SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"]
KEY = {"tenant": "default", "request_id": "base"}


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
    if method == "ListRequests":
        state = request_pb2.REQUEST_STATE_ACCEPTED
        return gateway_pb2.ListRequestsRequest(tenant="default", model=MODEL, after="1-0", limit=5, state=state)
    if method in ("Pause", "Resume"):
        return gateway_pb2.PauseRequest(model=MODEL)
    return GetMessageClass(SERVICE.methods_by_name[method].input_type)(**KEY)


@pytest.mark.parametrize("name", [method.name for method in SERVICE.methods])
async def test_hostile_requests_are_answered_or_refused_and_change_nothing(rig: Rig, name: str) -> None:
    gateway = await rig.gateway()
    method = SERVICE.methods_by_name[name]
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        base = gateway_pb2.SubmitRequest(request=good_request("Submit").request)  # type: ignore[attr-defined]
        base.request.request_id = "base"
        await call(channel, SERVICE.methods_by_name["Submit"], base.SerializeToString())

        tally = await call_with_all(channel, method, good_request(name), partial(dump_redis, rig.queue), waits=name == "Result")
    assert tally.refused > 10
    assert tally.answered > 0


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
