"""The planner on a real server: requests find groups, and none is lost on the way."""

from __future__ import annotations

from dataclasses import replace

import grpc.aio
import pytest

from qlm.api.v1 import planner_pb2, planner_pb2_grpc
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_planner.shell import leadership
from qlm_process.wire.profile import to_body
from qlm_queue.values import ESTIMATOR_ROLE

from .cluster import TRACEPARENT, Cluster, until


async def test_requests_are_placed_pulled_and_traced(cluster: Cluster) -> None:
    await cluster.join("a")
    await cluster.join("b", "H100-80GB")
    async with cluster.planner():
        keys = await cluster.submit("mistral-7b", count=50)
        keys += await cluster.submit("vicuna-13b", count=50)
        await until(cluster.all_placed, "all requests are placed")
        assert await cluster.waiting_on("a") + await cluster.waiting_on("b") == 100
        served = await cluster.serve("a") + await cluster.serve("b")
        assert served == 100
        assert await cluster.ended(keys)
    spans = [span for span in cluster.spans.get_finished_spans() if span.name == "qlm.placement"]
    assert len(spans) == 100
    for span in spans:
        assert span.parent is not None
        assert span.attributes is not None
        assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" in TRACEPARENT
        assert span.start_time is not None
        assert span.end_time is not None
        assert 0 <= span.end_time - span.start_time < 20e9
        assert str(span.attributes["qlm.group_id"]).startswith("g")


@pytest.mark.parametrize("thread_groups", [leadership.THREAD_GROUPS, 1], ids=["on the loop", "beside it"])
async def test_the_plan_over_grpc(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, thread_groups: int) -> None:
    monkeypatch.setattr(leadership, "THREAD_GROUPS", thread_groups)
    await cluster.join("a")
    async with cluster.planner() as shell, grpc.aio.insecure_channel(shell.address) as channel:
        stub = planner_pb2_grpc.PlannerStub(channel)
        await cluster.submit("mistral-7b", count=10)
        await until(cluster.all_placed, "placed")
        first = await stub.GetPlan(planner_pb2.GetPlanRequest(), timeout=20)
        assert {queue.instance for queue in first.queues} == {"a", UNASSIGNED}
        assert sum(group.waiting for queue in first.queues for group in queue.groups) == 10
        group = next(group for queue in first.queues for group in queue.groups)
        assert first.made_s < group.completion_p50_s < group.completion_p90_s
        answer = await stub.Replan(planner_pb2.ReplanRequest(why="a test"), timeout=20)
        plan = await stub.GetPlan(planner_pb2.GetPlanRequest(), timeout=20)
        assert plan.version >= answer.plan_version


async def test_the_plan_rests_on_the_last_readable_publication(cluster: Cluster) -> None:
    """An instance that is four times as slow; then nobody can read what the estimator says, and then it says that all is as usual."""
    await cluster.join("a")
    shipped = shipped_snapshot()
    slow = tuple(replace(row, instance="a", slowdown=4.0) for row in shipped.hardware if (row.gpu, row.n_gpu) == ("A100-80GB", 1))
    lease = await cluster.queue.acquire_lease(ESTIMATOR_ROLE, "e", 3_600.0, "")
    assert lease is not None
    async with cluster.planner(profiles_every_s=0.05) as shell, grpc.aio.insecure_channel(shell.address) as channel:
        stub = planner_pb2_grpc.PlannerStub(channel)
        await cluster.submit("mistral-7b", count=300)
        await until(cluster.all_placed, "placed")

        async def takes_s() -> float:
            plan = await stub.GetPlan(planner_pb2.GetPlanRequest(), timeout=20)
            return max(group.completion_p50_s for queue in plan.queues for group in queue.groups) - plan.made_s

        usual_s = await takes_s()

        async def is_slow() -> bool:
            return await takes_s() > 3.0 * usual_s

        async def is_as_usual() -> bool:
            return await takes_s() < 1.5 * usual_s

        await cluster.queue.publish_profiles(lease, 5, to_body(replace(shipped, version=5, hardware=(*shipped.hardware, *slow))))
        await until(is_slow, "the plan knows how slow the instance is")
        await cluster.queue.publish_profiles(lease, 6, b"\xff\xff\xff")
        await cluster.submit("mistral-7b", count=10)
        await until(cluster.all_placed, "placed")
        assert await is_slow()
        await cluster.queue.publish_profiles(lease, 7, to_body(replace(shipped, version=7)))
        await until(is_as_usual, "the plan knows that it is no more")


async def test_advice_to_meet_the_slos_over_grpc(cluster: Cluster) -> None:
    """More than one instance can do in time, and a model that none serves: who is late, and what to add."""
    await cluster.join("a", models=["mistral-7b"])
    await cluster.submit("mistral-7b", slo_s=20.0, count=2000)
    await cluster.submit("vicuna-13b", slo_s=20.0, count=5)
    async with cluster.planner(advice_every_s=2.0) as shell, grpc.aio.insecure_channel(shell.address) as channel:
        stub = planner_pb2_grpc.PlannerStub(channel)

        async def advised() -> bool:
            """The advice on all that was sent: the first may be of a moment when not all was placed."""
            try:
                return (await stub.GetAdvice(planner_pb2.GetAdviceRequest(), timeout=20)).unserved == 5
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                return False  # it does not lead at this moment: on a busy machine a lease may be lost, and won again

        await until(advised, "advice", 60.0)
        advice = await stub.GetAdvice(planner_pb2.GetAdviceRequest(), timeout=20)
        assert sum(miss.late for miss in advice.misses) > 100
        assert 1000 < advice.late < 2000
        assert {miss.instance for miss in advice.misses} == {"a"}
        assert any("vicuna-13b" in option.models and option.instances >= 1 and option.enough for option in advice.options)
        assert not advice.spare
        assert advice.line
        assert (await stub.GetPlan(planner_pb2.GetPlanRequest(), timeout=20)).advice == advice
