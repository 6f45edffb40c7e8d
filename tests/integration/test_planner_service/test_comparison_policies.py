"""A comparison policy whose program is solved beside the loop, live: it is followed, places everything and loses nothing."""

from __future__ import annotations

from qlm_planner.policy import Order

from .cluster import MODELS, Cluster, until

REQUESTS = 30


async def test_a_planner_follows_it(cluster: Cluster) -> None:
    """The other policies decide on the loop, as the default does."""
    await cluster.join("a")
    await cluster.join("b", models=MODELS[:2])
    async with cluster.planner(policy=Order.SHEPHERD) as shell:
        keys = [key for number in range(REQUESTS) for key in await cluster.submit(MODELS[number % 3], slo_s=20.0 * (1 + number % 5))]
        await until(cluster.all_placed, "all placed")

        async def both_have_work() -> bool:
            return {"a", "b"} <= {group.instance for group in (await cluster.overview()).groups.values()}

        await until(both_have_work, "the program is solved, and its plan applied")
        overview = await cluster.overview()
        assert shell.term is not None
        assert shell.term.machine.policy.order is Order.SHEPHERD
        on_b = [group for group in overview.groups.values() if group.instance == "b"]
        assert MODELS[2] not in {group.meta["model"] for group in on_b}, "which it does not serve"
        assert sum(group.waiting for group in overview.groups.values()) == REQUESTS
        version, _ = await shell.term.replan()
        assert version >= overview.plan_version
        # Groups moved meanwhile are served where they then are.
        served = 0

        async def all_served() -> bool:
            nonlocal served
            served += await cluster.serve("a") + await cluster.serve("b")
            return served == REQUESTS

        await until(all_served, "all served")
        assert await cluster.ended(keys)
        assert shell.term.plan_version >= version, "it is the same term"
