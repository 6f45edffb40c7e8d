"""Causes for the planner to look for a whole new order: each by itself, on a board that is otherwise at rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from qlm_planner.machine.effects import PlanCause, Stage
from qlm_planner.machine.events import ProfilesRead

from .world import CATALOGUE, LEASE_S, World, profiles

SLO_S = 50_000.0
"""Nobody is late, whatever the order."""


async def resting() -> World:
    """Two instances with work for a while, each at some of it, and nothing to change."""
    world = World()
    await world.join("a")
    await world.join("b", "small")
    await world.lead()
    await world.advance(2 * LEASE_S)
    for model in ("alpha", "beta", "gamma"):
        for slo_s in (SLO_S, 2 * SLO_S):
            await world.submit(model, slo_s, count=8)
            await world.settle()
    for name in ("a", "b"):
        if queue := (await world.queues())[name]:
            await world.pull(name, queue[0], 2)
    await world.advance(5.0)
    world.jobs.clear()
    await world.advance(5.0)
    assert not [job for job in world.jobs if job.stage is not Stage.REPAIR]
    return world


async def joins(world: World) -> None:
    await world.join("c")


async def leaves(world: World) -> None:
    await world.kill("b")


async def drains(world: World) -> None:
    await world.drain("b", "small")


async def drifts(world: World) -> None:
    snapshot = profiles(version=1)
    slow = replace(snapshot.hardware[0], instance="a", slowdown=2.0, samples=100, prior_share=0.1)
    await world.deliver(ProfilesRead(catalogue=CATALOGUE, profiles=replace(snapshot, hardware=(*snapshot.hardware, slow))))


async def is_late(world: World) -> None:
    await world.submit("alpha", 5.0, count=200)


@pytest.mark.parametrize(
    ("happen", "cause"),
    [
        (joins, PlanCause.JOINED),
        (leaves, PlanCause.LEFT),
        (drains, PlanCause.LEFT),
        (drifts, PlanCause.DRIFT),
        (is_late, PlanCause.MISS),
    ],
)
async def test_a_whole_new_order_is_looked_for(happen: Callable[[World], Awaitable[None]], cause: PlanCause) -> None:
    world = await resting()
    await happen(world)
    await world.advance(5.0)
    found = [job.cause for job in world.jobs if job.stage is not Stage.REPAIR]
    assert cause in found
    assert set(found) <= {cause, PlanCause.MISS, PlanCause.IDLE}


async def test_an_instance_without_work_beside_a_busy_one() -> None:
    world = await resting()
    await world.join("c")
    await world.advance(5.0)
    world.jobs.clear()
    keys = [request.key for group in await world.group_ids("c") for request in await world.queue.waiting(group, 0, 100)]
    await world.cancel(keys)
    await world.advance(5.0)
    assert PlanCause.IDLE in {job.cause for job in world.jobs}


async def test_an_instance_that_could_not_help_is_no_reason() -> None:
    """It serves another model than all that wait: a search would find the same order again and again."""
    world = await resting()
    await world.join("c", models=("delta",))
    await world.advance(5.0)
    world.jobs.clear()
    await world.advance(5.0)
    assert (await world.queues())["c"] == []
    assert PlanCause.IDLE not in {job.cause for job in world.jobs}
