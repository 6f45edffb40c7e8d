"""The gRPC server: health, reflection, limits, and one rule for errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from qlm.api.v1 import estimator_pb2, gateway_pb2, gateway_pb2_grpc
from qlm.wire_errors import from_rpc_error
from qlm_core.vocabulary.errors import ConfigError, InternalError, NotFound, QueueFull
from qlm_process.grpc_server import GrpcServer
from qlm_process.settings import GrpcSettings

SERVICE = "qlm.api.v1.Gateway"
DEADLINE_S = 30.0


class FailingGateway(gateway_pb2_grpc.GatewayServicer):
    """Each call fails, or answers, as its tenant says."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.waiting = asyncio.Event()

    async def Cancel(self, request: gateway_pb2.CancelRequest, context: Any) -> gateway_pb2.CancelResponse:
        if request.tenant == "missing":
            raise NotFound("no such request: é", details={"tenant": "missing"})
        if request.tenant == "bug":
            raise ZeroDivisionError("secret")
        if request.tenant == "abort":
            await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")
        if request.tenant == "wait":
            self.waiting.set()
            await asyncio.Event().wait()
        return gateway_pb2.CancelResponse()

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        """Writes to the context itself, and then fails."""
        await context.write(gateway_pb2.StreamResponse())
        raise NotFound("gone")

    async def Stream(self, request: gateway_pb2.StreamRequest, context: Any) -> AsyncIterator[gateway_pb2.StreamResponse]:
        try:
            yield gateway_pb2.StreamResponse()
            if request.tenant == "full":
                raise QueueFull("full", details={"bound": "queue", "limit": "1", "retry_after_s": "2.5"})
            await asyncio.Event().wait()
        finally:
            self.closed.set()


def failing_gateway() -> FailingGateway:
    return FailingGateway()  # type: ignore[abstract]  # no test calls the other methods


class Running:
    def __init__(self, server: GrpcServer, gateway: FailingGateway, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.gateway = gateway
        self.channel = channel
        self.stub: Any = gateway_pb2_grpc.GatewayStub(channel)

    async def health(self, service: str = "") -> int:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
        return int(response.status)


def make(gateway: FailingGateway, listen: str = "127.0.0.1:0", options: GrpcSettings | None = None) -> GrpcServer:
    def add(server: grpc.aio.Server) -> None:
        gateway_pb2_grpc.add_GatewayServicer_to_server(gateway, server)

    return GrpcServer(listen, [add], [SERVICE], options)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    gateway = failing_gateway()
    server = make(gateway, options=GrpcSettings(message_bytes_max=4096, concurrent_rpcs_max=4))
    port = await server.start()
    assert server.address == f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield Running(server, gateway, channel)
    await server.stop(0)
    await server.stop(0)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_health_follows_set_serving(running: Running) -> None:
    statuses = health_pb2.HealthCheckResponse
    assert await running.health() == statuses.NOT_SERVING
    await running.server.set_serving(True)
    assert await running.health() == statuses.SERVING
    assert await running.health(SERVICE) == statuses.SERVING
    await running.server.set_serving(False)
    assert await running.health(SERVICE) == statuses.NOT_SERVING


async def test_a_method_costs_no_task_that_every_call_wakes() -> None:
    before = asyncio.all_tasks()
    server = make(failing_gateway())
    await server.start()
    tasks = asyncio.all_tasks() - before
    await server.stop(0)
    assert len(tasks) < len(gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods)


async def test_reflection_lists_the_services(running: Running) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(running.channel)

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async for answer in stub.ServerReflectionInfo(ask(), timeout=DEADLINE_S):
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_qlm_error_keeps_its_code_reason_and_details(running: Running) -> None:
    error = await failure(running.stub.Cancel(gateway_pb2.CancelRequest(tenant="missing"), timeout=DEADLINE_S))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    known = from_rpc_error(error)
    assert isinstance(known, NotFound)
    assert (known.message, known.reason, known.details) == ("no such request: é", "UNKNOWN_REQUEST", {"tenant": "missing"})


async def test_a_stream_may_fail_after_its_first_message(running: Running) -> None:
    call = running.stub.Stream(gateway_pb2.StreamRequest(tenant="full"), timeout=DEADLINE_S)
    await call.read()
    known = from_rpc_error(await failure(call.read()))
    assert isinstance(known, QueueFull)
    assert known.retry_after_s == 2.5


async def test_a_stream_that_writes_itself_may_fail_too(running: Running) -> None:
    call = running.stub.Generate(gateway_pb2.GenerateRequest(), timeout=DEADLINE_S)
    await call.read()
    assert isinstance(from_rpc_error(await failure(call.read())), NotFound)


async def test_a_bug_is_internal_and_keeps_its_text(running: Running) -> None:
    error = await failure(running.stub.Cancel(gateway_pb2.CancelRequest(tenant="bug"), timeout=DEADLINE_S))
    assert isinstance(from_rpc_error(error), InternalError)
    assert "secret" not in str(error.details())


async def test_an_abort_by_hand_is_left_alone(running: Running) -> None:
    with capture_logs() as logged:
        error = await failure(running.stub.Cancel(gateway_pb2.CancelRequest(tenant="abort"), timeout=DEADLINE_S))
    assert error.code() is grpc.StatusCode.DATA_LOSS
    assert logged == []


async def test_a_client_that_leaves_closes_the_stream(running: Running) -> None:
    call = running.stub.Stream(gateway_pb2.StreamRequest(), timeout=DEADLINE_S)
    await call.read()
    call.cancel()
    async with asyncio.timeout(DEADLINE_S):
        await running.gateway.closed.wait()


async def test_a_message_over_the_limit_is_refused(running: Running) -> None:
    error = await failure(running.stub.Cancel(gateway_pb2.CancelRequest(tenant="x" * 5000), timeout=DEADLINE_S))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_over_the_limit_are_refused(running: Running) -> None:
    calls = [running.stub.Stream(gateway_pb2.StreamRequest(), timeout=DEADLINE_S) for _ in range(4)]
    for call in calls:
        await call.read()
    error = await failure(running.stub.Cancel(gateway_pb2.CancelRequest(), timeout=DEADLINE_S))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()


async def test_a_stop_ends_what_outlives_the_grace(running: Running) -> None:
    call = running.stub.Cancel(gateway_pb2.CancelRequest(tenant="wait"), timeout=DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        await running.gateway.waiting.wait()
        await running.server.stop(0)
        assert (await failure(call)).code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


async def test_a_taken_port_is_a_wrong_setting(running: Running) -> None:
    second = make(failing_gateway(), listen=running.server.address)
    with pytest.raises(ConfigError, match="cannot bind"):
        await second.start()


async def test_a_unix_socket_works(tmp_path: Path) -> None:
    server = make(failing_gateway(), listen=f"unix:{tmp_path}/gateway.sock")
    await server.stop()
    assert await server.start() == 0
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayStub(channel)
        await stub.Cancel(gateway_pb2.CancelRequest(), timeout=DEADLINE_S)
    await server.stop(0)


async def test_an_unknown_method_is_unimplemented(running: Running) -> None:
    call: Any = running.channel.unary_unary(
        f"/{SERVICE}/Nothing", request_serializer=estimator_pb2.GetProfilesRequest.SerializeToString, response_deserializer=bytes
    )
    error = await failure(call(estimator_pb2.GetProfilesRequest(), timeout=DEADLINE_S))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
