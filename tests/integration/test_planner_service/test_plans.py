"""Changes of the plan on a real queue: instances that leave, drain or join, and the reports of it (spans, metric, events)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import grpc.aio

from qlm.api.v1 import planner_pb2, planner_pb2_grpc
from qlm.internal.v1 import events_pb2
from qlm_core.vocabulary.instance import UNASSIGNED, InstanceFacts
from qlm_planner.shell.process import PlannerShell
from qlm_process.wire.instance import to_body, to_proto

from .cluster import MODELS, Cluster, until

FACTS = InstanceFacts(name="a", incarnation="", gpu="A100-80GB", n_gpu=1, engine="simulated", models=MODELS)


async def leading(cluster: Cluster, shell: PlannerShell) -> None:
    async def leads() -> bool:
        return shell.term is not None and shell.term.caught_up.is_set()

    await until(leads, "it leads")


def spans(cluster: Cluster, name: str) -> list[dict[str, object]]:
    return [dict(span.attributes or {}) for span in cluster.spans.get_finished_spans() if span.name == name]


async def changes_ended(cluster: Cluster, causes: Sequence[str]) -> None:
    """Waits for the spans of changes of the plan, in this order, perhaps with others between them: they end when the planner has heard that
    the last chunk is in the queue."""

    async def found() -> bool:
        seen = iter([plan["qlm.plan.cause"] for plan in spans(cluster, "qlm.plan")])
        return all(cause in seen for cause in causes)

    await until(found, f"changes of the plan: {causes}")


async def moved_groups(cluster: Cluster) -> dict[str, str]:
    """Placement by the events: group -> the queue that it is on now."""
    found: dict[str, str] = {}
    for entry in await cluster.queue.read_events("0", 0.0, 1000):
        for event in events_pb2.RequestEvents.FromString(entry.payload).events:
            if event.kind == events_pb2.EVENT_KIND_GROUPS_MOVED:
                found.update(dict.fromkeys(event.group_ids, event.instance))
    return found


async def test_a_drain_moves_the_groups_away_at_once(cluster: Cluster) -> None:
    """Announced over gRPC, long before the next regular reading of the queue; nothing is placed there any more, and it is all reported."""
    incarnation = await cluster.join("a")
    async with cluster.planner(overview_every_s=30.0) as shell, grpc.aio.insecure_channel(shell.address) as channel:
        await leading(cluster, shell)
        await cluster.submit("mistral-7b", count=10)
        await cluster.submit("vicuna-13b", count=10)
        await until(cluster.all_placed, "placed")
        await cluster.join("b", "H100-80GB")
        facts = replace(FACTS, incarnation=incarnation, draining=True)
        await cluster.describe("a", to_body(facts))
        stub = planner_pb2_grpc.PlannerStub(channel)
        await stub.RegisterInstance(planner_pb2.RegisterInstanceRequest(instance=to_proto(facts)), timeout=30)

        async def moved() -> bool:
            return await cluster.waiting_on("b") == 20

        await until(moved, "everything is with the other one", 30.0)
        await cluster.submit("mistral-7b", count=10)
        await until(cluster.all_placed, "placed")
        assert await cluster.waiting_on("a") == 0
        events = await moved_groups(cluster)
        assert set(events.values()) == {"b"}
        await changes_ended(cluster, ["relocate"])
        [plan] = spans(cluster, "qlm.plan")
        assert plan["qlm.plan.whole"] is True
        [balance] = spans(cluster, "qlm.load_balance")
        assert balance["qlm.groups_moved"] == len(events)
        assert (balance["qlm.sources"], balance["qlm.destinations"]) == (("a",), ("b",))
        assert cluster.metrics.registry.get_sample_value("qlm_planner_groups_moved_total") == len(events)
        assert await cluster.serve("b") == 30


async def test_an_instance_that_leaves_in_order_keeps_nothing(cluster: Cluster) -> None:
    """Deregistered, its groups still on its queue: they are somebody else's after the planner has seen it."""
    await cluster.join("a", models=["mistral-7b"])
    await cluster.join("b", models=["vicuna-13b"])
    async with cluster.planner() as shell:
        await leading(cluster, shell)
        await cluster.submit("mistral-7b", count=10)
        await until(cluster.all_placed, "placed")
        await cluster.deregister("a")

        async def unassigned() -> bool:
            return await cluster.waiting_on(UNASSIGNED) == 10

        await until(unassigned, "nobody serves that model any more")
        await cluster.join("c", models=["mistral-7b"])

        async def taken() -> bool:
            return await cluster.waiting_on("c") == 10

        await until(taken, "until somebody does")
        await changes_ended(cluster, ["relocate", "relocate"])
        assert [balance["qlm.destinations"] for balance in spans(cluster, "qlm.load_balance")] == [(UNASSIGNED,), ("c",)]
