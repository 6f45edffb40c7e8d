"""Groups that are split while they wait, on a real queue."""

from __future__ import annotations

from dataclasses import replace

from qlm_core.instance import InstanceFacts
from qlm_core.request import RequestState
from qlm_process.wire.instance import to_body

from .cluster import MODELS, Cluster, until

FACTS = InstanceFacts(name="a", incarnation="", gpu="A100-80GB", n_gpu=1, engine="simulated", models=MODELS)
COUNT = 300
BATCH = 10


async def test_a_group_is_split_where_the_batch_became_smaller(cluster: Cluster) -> None:
    """Nothing is lost or doubled, the order is kept, and what runs meanwhile stays with its agent."""
    incarnation = await cluster.join("a")
    async with cluster.planner():
        keys = await cluster.submit("mistral-7b", slo_s=36_000.0, count=COUNT)
        await until(cluster.all_placed, "placed")
        assert max(group.waiting for group in (await cluster.overview()).groups.values()) > 8 * BATCH
        running = await cluster.pull("a", "mistral-7b", 7)
        await cluster.describe("a", to_body(replace(FACTS, incarnation=incarnation, batch_max=BATCH)))

        async def small() -> bool:
            groups = (await cluster.overview()).groups.values()
            return all(group.waiting <= 1.25 * 4 * BATCH for group in groups)

        await until(small, "every group is within its limit", 30.0)
        overview = await cluster.overview()
        assert sum(group.waiting for group in overview.groups.values()) == COUNT - 7
        queue = next(queue for queue in overview.virtual_queues if queue.instance == "a")
        pages = [await cluster.queue.waiting(group_id, 0, 500) for group_id in queue.group_ids]
        assert [request.key for page in pages for request in page] == keys[7:]
        for each in running:
            found = await cluster.queue.find(each.key)
            assert found.state is RequestState.RUNNING
        await cluster.complete("a", running)
        assert await cluster.serve("a") == COUNT - 7
        assert await cluster.ended(keys)
    assert (cluster.metrics.registry.get_sample_value("qlm_planner_regrouped_total") or 0) >= COUNT - 7 - 1.25 * 4 * BATCH
