"""The Agent service, health, and the announcements to the planner."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import NoReturn

import grpc
import grpc.aio
import pytest

from qlm.api.v1 import agent_pb2, agent_pb2_grpc, planner_pb2, planner_pb2_grpc
from qlm.wire_errors import from_rpc_error
from qlm_queue.values import PLANNER_ROLE

from .rig import Rig, RunningAgent, until

TIMEOUT_S = 20.0


@pytest.fixture
async def agent(rig: Rig) -> RunningAgent:
    return await rig.agent()


@pytest.fixture
async def stub(agent: RunningAgent) -> AsyncIterator[agent_pb2_grpc.AgentAsyncStub]:
    async with grpc.aio.insecure_channel(agent.address) as channel:
        yield agent_pb2_grpc.AgentStub(channel)


async def test_status(rig: Rig, agent: RunningAgent, stub: agent_pb2_grpc.AgentAsyncStub) -> None:
    names = await rig.accept(3, answer=2000)
    await rig.place(names)
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in names), "all run")
    status = await stub.GetStatus(agent_pb2.GetAgentStatusRequest(), timeout=TIMEOUT_S)
    assert (status.instance.name, status.instance.incarnation, status.instance.address) == ("a", "a/1", agent.address)
    assert list(status.instance.models) == ["m", "n"]
    assert (status.load.active_model, status.load.running, status.load.kv_capacity_tokens) == ("m", 3, 460_416)
    assert status.load.kv_used_tokens >= 3 * 30
    why = r"\(there and back .+, computed again .+; host memory left for [\d,]+ tokens\)"
    assert re.fullmatch(rf"(KV swap|evict) .+ {why}", status.load.eviction_choice)
    for name in names:
        await rig.cancel(name)


async def test_models_are_warmed_and_dropped(agent: RunningAgent, stub: agent_pb2_grpc.AgentAsyncStub) -> None:
    loaded = await stub.LoadModel(agent_pb2.LoadModelRequest(model="n"), timeout=TIMEOUT_S)
    assert loaded.took_s > 0.05
    assert list(agent.process.shell.load().warm_models) == ["n"]
    await stub.UnloadModel(agent_pb2.UnloadModelRequest(model="n"), timeout=TIMEOUT_S)
    assert list(agent.process.shell.load().warm_models) == []


async def test_errors_have_codes_and_reasons(rig: Rig, stub: agent_pb2_grpc.AgentAsyncStub) -> None:
    names = await rig.accept(1)
    await rig.place(names)
    await rig.results_of(names)
    calls: list[tuple[Awaitable[object], grpc.StatusCode, str]] = [
        (stub.LoadModel(agent_pb2.LoadModelRequest(model="x")), grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
        (stub.LoadModel(agent_pb2.LoadModelRequest()), grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
        (stub.UnloadModel(agent_pb2.UnloadModelRequest(model="m")), grpc.StatusCode.FAILED_PRECONDITION, "MODEL_BUSY"),
        *(
            (stub.Drain(agent_pb2.DrainRequest(finish_s=wrong)), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
            for wrong in (-1.0, 3601.0, float("nan"), float("inf"))
        ),
    ]
    for call, code, reason in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is code
        assert from_rpc_error(caught.value).reason == reason


async def test_drain_answers_when_nothing_is_owned(rig: Rig, agent: RunningAgent, stub: agent_pb2_grpc.AgentAsyncStub) -> None:
    names = await rig.accept(4, answer=3000)
    await rig.place(names)
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in names), "all run")
    answer = await stub.Drain(agent_pb2.DrainRequest(finish_s=0.0), timeout=TIMEOUT_S)
    assert (answer.finished, answer.requeued) == (0, 4)
    assert agent.owned == 0
    status = await stub.GetStatus(agent_pb2.GetAgentStatusRequest(), timeout=TIMEOUT_S)
    assert status.instance.draining


class Planner(planner_pb2_grpc.PlannerServicer):
    """Only listens."""

    def __init__(self) -> None:
        self.announced: list[str] = []
        self.heartbeats: list[planner_pb2.HeartbeatRequest] = []

    async def RegisterInstance(self, request: planner_pb2.RegisterInstanceRequest, context: object) -> planner_pb2.RegisterInstanceResponse:
        self.announced.append(request.instance.incarnation)
        return planner_pb2.RegisterInstanceResponse()

    async def Heartbeat(self, request: planner_pb2.HeartbeatRequest, context: object) -> planner_pb2.HeartbeatResponse:
        self.heartbeats.append(request)
        return planner_pb2.HeartbeatResponse()

    async def Replan(self, request: object, context: object) -> NoReturn:
        raise AssertionError("an agent does not call that")

    async def GetPlan(self, request: object, context: object) -> NoReturn:
        raise AssertionError("an agent does not call that")

    async def GetAdvice(self, request: object, context: object) -> NoReturn:
        raise AssertionError("an agent does not call that")


@asynccontextmanager
async def leader(rig: Rig) -> AsyncIterator[Planner]:
    """The planner that leads from then on."""
    planner = Planner()
    server = grpc.aio.server()
    planner_pb2_grpc.add_PlannerServicer_to_server(planner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await rig.expire_lease(PLANNER_ROLE)
    await rig.queue.acquire_lease(PLANNER_ROLE, "other", 600.0, f"127.0.0.1:{port}")
    yield planner
    await server.stop(None)


async def test_the_planner_receives_reports(rig: Rig) -> None:
    agent = await rig.agent()  # no leader yet: it serves all the same
    async with leader(rig) as planner:
        await until(lambda: len(planner.heartbeats) >= 2, "heartbeats")
        assert planner.announced == ["a/1"]
        assert planner.heartbeats[0].incarnation == "a/1"
        await rig.expire_lease("a/1")
        await until(lambda: planner.announced == ["a/1", "a/2"], "the next incarnation is announced")
    await agent.stop()


async def test_the_planner_hears_at_once_of_a_model_swap(rig: Rig) -> None:
    """Each model swap is reported before the next heartbeat, which here is never due."""
    agent = await rig.agent(heartbeat_s=3_600.0)
    for number, model in enumerate(("m", "n", "m")):
        await rig.place(await rig.accept(1, model=model, answer=2_000), group=f"g{number}", model=model)
    async with leader(rig) as planner:
        await until(lambda: served(planner)[-2:] == ["n", "m"], "both are reported")
        assert planner.announced == ["a/1"]
        await agent.stop()


def served(planner: Planner) -> list[str]:
    """Models in the order in which heartbeats report each as active, or as becoming so."""
    models = [each.load.swapping_to or each.load.active_model for each in planner.heartbeats]
    return [model for model, _ in itertools.groupby(filter(None, models))]
