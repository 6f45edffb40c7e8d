"""A leader that loses its lease, is overloaded or loses its server; `test_failover_roles` kills, pauses and stops planners."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from qlm.api.v1 import instance_pb2, planner_pb2, planner_pb2_grpc
from qlm.wire_errors import from_rpc_error
from qlm_core.vocabulary.errors import InvalidRequest, LeaseLost, NotFound, PreconditionFailed, Unavailable
from qlm_planner.machine.events import LoadReported
from qlm_planner.shell.leadership import Leadership
from qlm_planner.shell.process import PlannerShell
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.values import ESTIMATOR_ROLE, PLANNER_ROLE

from .cluster import DEADLINE_S, RENEW_S, SHORT_LEASE_S, Cluster, until


async def refused(call: Awaitable[object]) -> PreconditionFailed:
    with pytest.raises(grpc.RpcError) as refusal:
        await call
    error = from_rpc_error(refusal.value)
    assert isinstance(error, PreconditionFailed)
    return error


async def test_a_leader_whose_lease_is_gone_leads_no_more_until_it_wins_another(cluster: Cluster) -> None:
    """Another process has it: answers name the leader, nothing is placed, and nothing is shown of
    a plan that is not ours. Free again, it is won with another fence, and all that arrived meanwhile is placed."""
    await cluster.join("a")

    def figure(name: str) -> float | None:
        return cluster.metrics.registry.get_sample_value(name)

    async with cluster.planner() as shell, grpc.aio.insecure_channel(shell.address) as channel:
        stub = planner_pb2_grpc.PlannerStub(channel)
        await cluster.submit("mistral-7b", count=10)
        await until(cluster.all_placed, "placed")
        first = shell.term
        assert first is not None
        assert (figure("qlm_planner_leader"), figure("qlm_planner_groups")) == (1.0, 1.0)
        lease = first._keeper.lease
        await cluster.queue.release_lease(lease)
        other = await cluster.queue.acquire_lease(PLANNER_ROLE, "another", 3600.0, "other:1")
        assert other is not None

        async def stands_by() -> bool:
            return shell.term is None

        await until(stands_by, "it knows that it lost its lease")
        assert (await refused(stub.GetPlan(planner_pb2.GetPlanRequest(), timeout=30))).details["leader"] == "other:1"
        assert (await refused(stub.Replan(planner_pb2.ReplanRequest(), timeout=30))).reason == "NOT_LEADER"
        assert (figure("qlm_planner_leader"), figure("qlm_planner_groups")) == (0.0, 0.0)
        keys = await cluster.submit("vicuna-13b", count=10)
        await asyncio.sleep(2 * RENEW_S)
        assert (await cluster.overview()).unplaced == 10
        await cluster.queue.release_lease(other)
        await until(cluster.all_placed, "placed by the next term")
        assert shell.term is not None
        assert shell.term is not first
        assert shell.term._keeper.lease.fence > other.fence > lease.fence
        assert await cluster.serve("a") == 20
        assert await cluster.ended(keys)


async def _led(shell: PlannerShell) -> Leadership:
    """Its term, once it has caught up."""

    async def leads() -> bool:
        return shell.term is not None and shell.term.caught_up.is_set()

    await until(leads, "it leads")
    assert shell.term is not None
    return shell.term


async def test_a_replan_that_is_requested_as_the_lease_ends_is_answered(cluster: Cluster) -> None:
    """No decision is made any more that could answer it."""
    await cluster.join("a")
    async with cluster.planner() as shell:
        term = await _led(shell)
        async with term._turn:
            pending = asyncio.create_task(term.replan())
            await asyncio.sleep(0)
            await cluster.queue.release_lease(term._keeper.lease)
            with pytest.raises(LeaseLost):
                await asyncio.wait_for(pending, DEADLINE_S)


async def test_calls_from_outside_are_refused_when_too_much_waits(cluster: Cluster) -> None:
    """And taken again when it has been worked off. Answers of the queue always find room."""
    await cluster.join("a")
    async with cluster.planner(inbox_max=5) as shell:
        term = await _led(shell)
        async with term._turn:
            with pytest.raises(Unavailable, match="overloaded"):
                _report_much(term)
            with pytest.raises(Unavailable, match="overloaded"):
                await term.replan()
        assert (await asyncio.wait_for(term.replan(), DEADLINE_S))[1] == 0
        await cluster.submit("mistral-7b", count=10)
        await until(cluster.all_placed, "placed")


def _report_much(term: Leadership) -> None:
    for _ in range(7):
        term.submit(LoadReported(incarnation="x/1", active_model="", warm_models=()))


async def test_profiles_that_cannot_be_read_leave_the_last_ones(cluster: Cluster) -> None:
    await cluster.join("a")
    async with cluster.planner(profiles_every_s=0.05) as shell:
        await cluster.submit("mistral-7b", count=10)
        await until(cluster.all_placed, "placed")
        lease = await cluster.queue.acquire_lease(ESTIMATOR_ROLE, "nonce", 3600.0, "estimator:1")
        assert lease is not None
        with capture_logs() as logs:
            await cluster.queue.publish_profiles(lease, 7, b"\xff\xff")

            async def said() -> bool:
                return any(log["event"] == "profiles_unreadable" for log in logs)

            await until(said, "it is said")
            await cluster.submit("vicuna-13b", count=10)
            await until(cluster.all_placed, "placed all the same")
            await asyncio.sleep(0.3)
        assert [log["version"] for log in logs if log["event"] == "profiles_unreadable"] == [7], "once for what is there"
        assert shell.term is not None
        assert await cluster.serve("a") == 20


async def test_the_server_stops_and_restarts(cluster: Cluster, server: EmbeddedServer) -> None:
    """The planner survives it (as a new leader where its lease ended) and continues where it was."""
    cluster.lease_s = SHORT_LEASE_S
    await cluster.join("a")
    async with cluster.planner() as shell:
        await cluster.submit("mistral-7b", count=20)
        await until(cluster.all_placed, "placed")
        await server.stop()
        await asyncio.sleep(1.5 * SHORT_LEASE_S)
        await server.start()

        async def again() -> bool:
            return shell.term is not None and shell.term.caught_up.is_set()

        keys = await cluster.submit("vicuna-13b", count=20)
        await until(cluster.all_placed, "placed after the server restarted")
        await until(again, "the planner has caught up")
        assert await cluster.serve("a") == 40
        assert await cluster.ended(keys)


async def test_bad_input_is_refused(cluster: Cluster) -> None:
    async with cluster.planner() as shell, grpc.aio.insecure_channel(shell.address) as channel:

        async def leads() -> bool:
            return shell.term is not None and shell.term.caught_up.is_set()

        await until(leads, "it leads")
        stub = planner_pb2_grpc.PlannerStub(channel)
        nameless = instance_pb2.Instance(incarnation="x/1", n_gpu=1)
        unregistered = instance_pb2.Instance(name="x", n_gpu=1)
        other = instance_pb2.Instance(name="x", incarnation="y/1", n_gpu=1)
        frozen = instance_pb2.Instance(name="x", incarnation="x/1", n_gpu=1, time_scale=float("nan"))
        bad: list[Awaitable[object]] = [
            stub.RegisterInstance(planner_pb2.RegisterInstanceRequest(instance=other), timeout=30),
            stub.RegisterInstance(planner_pb2.RegisterInstanceRequest(instance=frozen), timeout=30),
            stub.Heartbeat(planner_pb2.HeartbeatRequest(incarnation="x" * 1000 + "/1"), timeout=30),
            stub.RegisterInstance(planner_pb2.RegisterInstanceRequest(), timeout=30),
            stub.RegisterInstance(planner_pb2.RegisterInstanceRequest(instance=nameless), timeout=30),
            stub.RegisterInstance(planner_pb2.RegisterInstanceRequest(instance=unregistered), timeout=30),
            stub.Heartbeat(planner_pb2.HeartbeatRequest(), timeout=30),
            stub.Replan(planner_pb2.ReplanRequest(why="é" * 129), timeout=30),
        ]
        for call in bad:
            with pytest.raises(grpc.RpcError) as refusal:
                await call
            assert isinstance(from_rpc_error(refusal.value), InvalidRequest)
        # An instance that is not registered in the queue is searched there, and not believed.
        stranger = instance_pb2.Instance(name="x", incarnation="x/7", n_gpu=1, models=["mistral-7b"])
        await stub.RegisterInstance(planner_pb2.RegisterInstanceRequest(instance=stranger), timeout=30)
        with pytest.raises(grpc.RpcError) as refusal:
            await stub.Heartbeat(planner_pb2.HeartbeatRequest(incarnation="x/7"), timeout=30)
        error = from_rpc_error(refusal.value)
        assert (type(error), error.reason, error.details) == (NotFound, "UNKNOWN_INSTANCE", {"instance": "x/7"})
        answer = await stub.Replan(planner_pb2.ReplanRequest(why="nothing to do"), timeout=30)
        assert answer.groups_moved == 0
