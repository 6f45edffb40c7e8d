"""The replay against a small in-test gateway: arrivals by the trace clock, resumed streams, and what the ledger makes of faults."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from qlm.api.v1 import gateway_pb2, request_pb2
from qlm.api.v1.gateway_pb2_grpc import GatewayServicer, add_GatewayServicer_to_server
from qlm_core.vocabulary.simulated_model import answer_length, answer_tokens, prompt_digest
from qlm_load.replay.ledger import Ledger, Report
from qlm_load.replay.replay import Replay, ReplaySettings, rotated
from qlm_load.workload.trace import Trace, TraceRow
from qlm_load.workload.workload import ModelShare, Workload, make_workload

VOCABULARY_SIZE = 1000
CHUNK_TOKENS = 4
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class Backend:
    """What the in-test gateways share: accepted requests and their answers. The hooks plant faults."""

    requests: dict[str, request_pb2.Request] = field(default_factory=dict)
    arrived_s: list[float] = field(default_factory=list)
    on_tokens: Callable[[str, str, int, list[int]], list[int]] = lambda gateway, request_id, offset, tokens: tokens
    on_result: Callable[[str, request_pb2.Result], request_pb2.Result] = lambda gateway, result: result

    def answer(self, request_id: str) -> list[int]:
        request = self.requests[request_id]
        ids = list(request.tokens.ids)
        packed = answer_tokens(prompt_digest(request.model, ids), 0, answer_length(ids), VOCABULARY_SIZE)
        return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]

    def result(self, request_id: str) -> request_pb2.Result:
        return request_pb2.Result(
            request_id=request_id,
            queue_id=f"{request_id}-q",
            state=request_pb2.REQUEST_STATE_COMPLETED,
            attempts=1,
            output_token_ids=self.answer(request_id),
        )


class BrokenOffError(Exception):
    """A hook ends the connection."""


class StandInGateway(GatewayServicer):
    def __init__(self, name: str, backend: Backend) -> None:
        self._name = name
        self._backend = backend

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Context) -> AsyncIterator[gateway_pb2.StreamResponse]:
        request_id = request.request.request_id
        self._backend.requests[request_id] = request.request
        self._backend.arrived_s.append(time.monotonic())
        accepted = gateway_pb2.Accepted(
            request_id=request_id, queue_id=f"{request_id}-q", state=request_pb2.REQUEST_STATE_ACCEPTED, accepted_s=1.0
        )
        yield gateway_pb2.StreamResponse(accepted=accepted)
        async for response in self._stream(request_id, 0, context):
            yield response

    async def Stream(self, request: gateway_pb2.StreamRequest, context: Context) -> AsyncIterator[gateway_pb2.StreamResponse]:
        async for response in self._stream(request.request_id, request.offset, context):
            yield response

    async def Result(self, request: gateway_pb2.ResultRequest, context: Context) -> gateway_pb2.ResultResponse:
        if request.request_id not in self._backend.requests:
            await context.abort(grpc.StatusCode.NOT_FOUND, "never accepted here")
        result = self._backend.on_result(self._name, self._backend.result(request.request_id))
        if result.state == request_pb2.REQUEST_STATE_RUNNING:
            return gateway_pb2.ResultResponse(state=result.state)
        return gateway_pb2.ResultResponse(state=result.state, result=result)

    async def Submit(self, request: gateway_pb2.SubmitRequest, context: Context) -> gateway_pb2.SubmitResponse:
        raise NotImplementedError

    async def Cancel(self, request: gateway_pb2.CancelRequest, context: Context) -> gateway_pb2.CancelResponse:
        raise NotImplementedError

    async def ListModels(self, request: gateway_pb2.ListModelsRequest, context: Context) -> gateway_pb2.ListModelsResponse:
        raise NotImplementedError

    async def ListRequests(self, request: gateway_pb2.ListRequestsRequest, context: Context) -> gateway_pb2.ListRequestsResponse:
        raise NotImplementedError

    async def Pause(self, request: gateway_pb2.PauseRequest, context: Context) -> gateway_pb2.PauseResponse:
        raise NotImplementedError

    async def Resume(self, request: gateway_pb2.PauseRequest, context: Context) -> gateway_pb2.PauseResponse:
        raise NotImplementedError

    async def QueueStatus(self, request: gateway_pb2.QueueStatusRequest, context: Context) -> gateway_pb2.QueueStatusResponse:
        raise NotImplementedError

    async def _stream(self, request_id: str, offset: int, context: Context) -> AsyncIterator[gateway_pb2.StreamResponse]:
        answer = self._backend.answer(request_id)
        for at in range(offset, len(answer), CHUNK_TOKENS):
            try:
                tokens = self._backend.on_tokens(self._name, request_id, at, answer[at : at + CHUNK_TOKENS])
            except BrokenOffError:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            yield gateway_pb2.StreamResponse(tokens=gateway_pb2.TokenChunk(offset=at, token_ids=tokens))
        result = self._backend.on_result(self._name, self._backend.result(request_id))
        if result.state == request_pb2.REQUEST_STATE_RUNNING:  # the hook's way to say: never ends
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        yield gateway_pb2.StreamResponse(result=result)


def workload_of(count: int, gap_s: float = 0.02) -> Workload:
    rows = tuple(TraceRow(arrival_s=gap_s * n, input_tokens=6, output_tokens=9 + n % 3) for n in range(count))
    return make_workload(Trace(rows=rows), (ModelShare(name="m", share=1.0, vocabulary_size=VOCABULARY_SIZE),), seed=1, run_id="t")


@asynccontextmanager
async def gateways(backend: Backend) -> AsyncIterator[tuple[str, str]]:
    servers = []
    addresses = []
    for name in ("one", "two"):
        server = grpc.aio.server()
        add_GatewayServicer_to_server(StandInGateway(name, backend), server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        yield addresses[0], addresses[1]
    finally:
        for server in servers:
            await server.stop(None)


async def replayed(backend: Backend, workload: Workload, **settings: Any) -> tuple[Report, Ledger]:
    async with gateways(backend) as addresses:
        start_s = time.monotonic() + 0.05
        values: dict[str, Any] = {"time_scale": 1.0, "reconnect_attempts_max": 3, "drain_timeout_s": 20.0, **settings}
        ledger = Ledger(workload, values["time_scale"], start_s)
        replay = Replay(workload, ledger, ReplaySettings(addresses=addresses, **values))
        await replay.run(start_s)
        await replay.read_again()
        progress = replay.progress()
        assert (progress.sent, progress.in_flight) == (len(workload.requests), 0)
        assert sum(progress.streams.values()) == 0
        return ledger.report(time.monotonic()), ledger


async def test_replays_every_request_once_and_checks_every_token() -> None:
    backend = Backend()
    workload = workload_of(20)
    report, _ = await replayed(backend, workload)
    assert report.clean, report.problems
    assert (report.sent, report.accepted, report.completed, report.verified) == (20, 20, 20, 20)
    assert report.recovered == 0
    assert report.tokens == sum(request.output_tokens for request in workload.requests)
    assert set(backend.requests) == {request.request_id for request in workload.requests}
    for request in workload.requests:
        sent = backend.requests[request.request_id]
        assert list(sent.tokens.ids) == workload.prompt_ids(request)
        assert sent.sampling.max_tokens == request.output_tokens_max
        assert sent.slo.seconds == request.slo_s


async def test_arrivals_follow_the_scaled_trace_clock() -> None:
    backend = Backend()
    await replayed(backend, workload_of(5, gap_s=4.0), time_scale=20.0)
    spans = [later - backend.arrived_s[0] for later in backend.arrived_s]
    # Open loop: never earlier than due, and not later than a busy machine explains.
    for n, span_s in enumerate(spans):
        assert 0.2 * n - 0.1 < span_s < 0.2 * n + 20.0


async def test_slos_are_scaled_to_real_time() -> None:
    backend = Backend()
    workload = workload_of(4)
    await replayed(backend, workload, time_scale=10.0)
    assert {backend.requests[r.request_id].slo.seconds for r in workload.requests} == {r.slo_s / 10.0 for r in workload.requests}


async def test_a_stream_that_breaks_off_goes_on_at_the_other_gateway() -> None:
    def on_tokens(gateway: str, request_id: str, offset: int, tokens: list[int]) -> list[int]:
        if gateway == "one" and offset >= CHUNK_TOKENS:
            raise BrokenOffError
        return tokens

    report, _ = await replayed(Backend(on_tokens=on_tokens), workload_of(10))
    assert report.clean, report.problems
    assert report.completed == 10
    assert 0 < report.recovered == report.streams_resumed <= 10


async def test_a_wrong_token_on_the_wire_is_noticed() -> None:
    def on_tokens(gateway: str, request_id: str, offset: int, tokens: list[int]) -> list[int]:
        return [tokens[0] ^ 1, *tokens[1:]] if request_id == "t-3" and offset == 4 else tokens

    report, _ = await replayed(Backend(on_tokens=on_tokens), workload_of(6))
    assert report.wrong == 1
    assert not report.clean


async def test_a_result_that_differs_at_another_gateway_is_doubled() -> None:
    def on_result(gateway: str, result: request_pb2.Result) -> request_pb2.Result:
        if result.request_id == "t-2":  # sent to gateway "one"
            result.attempts = 1 if gateway == "one" else 2
        return result

    report, _ = await replayed(Backend(on_result=on_result), workload_of(6))
    assert report.doubled == 1


async def test_a_request_that_never_ends_is_lost() -> None:
    def on_result(gateway: str, result: request_pb2.Result) -> request_pb2.Result:
        if result.request_id == "t-1":
            result.state = request_pb2.REQUEST_STATE_RUNNING
        return result

    backend = Backend(on_result=on_result)
    report, _ = await replayed(backend, workload_of(3), reconnect_attempts_max=2)
    assert (report.lost, report.completed) == (1, 2)
    assert not report.clean


async def test_more_than_the_bound_is_never_open() -> None:
    seen: list[int] = []
    backend = Backend()
    workload = workload_of(12, gap_s=0.0)
    async with gateways(backend) as addresses:
        start_s = time.monotonic()
        ledger = Ledger(workload, 1.0, start_s)
        replay = Replay(workload, ledger, ReplaySettings(addresses=addresses, in_flight_max=3, drain_timeout_s=20.0))

        def on_tokens(gateway: str, request_id: str, offset: int, tokens: list[int]) -> list[int]:
            seen.append(replay.progress().in_flight)
            return tokens

        backend.on_tokens = on_tokens
        await replay.run(start_s)
    assert max(seen) == 3
    assert ledger.report(time.monotonic()).completed == 12


def test_rotated() -> None:
    assert rotated(("a", "b", "c"), 1) == ("b", "c", "a")
    assert rotated(("a", "b"), 2) == ("a", "b")
