"""Models and tenants that are paused: their groups leave the instances' queues, wait on "unassigned", and come back."""

from __future__ import annotations

import pytest

from qlm_core.instance import UNASSIGNED
from qlm_core.pauses import PauseKind
from qlm_planner.overload.advice_question import question_of
from qlm_planner.plan.relocation import homeless
from qlm_planner.policy import Order, Policy

from .world import LEASE_S, World

LATER_S = 20.0


@pytest.mark.parametrize("order", [Order.SLO, Order.FCFS, Order.EDF])
async def test_groups_of_a_paused_model_wait_unassigned_and_come_back(order: Order) -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, order=order))
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", count=3)
    await world.submit("beta", count=2)
    await world.advance(1.0)
    await world.queue.pause(PauseKind.MODEL, "alpha")
    await world.advance(LATER_S)
    assert await waiting_on(world, "a") == {"beta": 2}
    assert await waiting_on(world, UNASSIGNED) == {"alpha": 3}

    await world.submit("alpha", slo_s=900.0, count=8)
    await world.settle()
    assert await waiting_on(world, UNASSIGNED) == {"alpha": 11}, "it goes there at once"
    await world.advance(LATER_S)
    assert await waiting_on(world, "a") == {"beta": 2}
    assert homeless(machine.board, machine.estimates, lost_too=True) == [], "it stays there"

    await world.queue.resume(PauseKind.MODEL, "alpha")
    await world.advance(LATER_S)
    assert await waiting_on(world, "a") == {"alpha": 11, "beta": 2}
    assert await waiting_on(world, UNASSIGNED) == {}


@pytest.mark.parametrize("order", [Order.SLO, Order.FCFS])
async def test_requests_of_a_paused_tenant_leave_the_groups_that_they_share(order: Order) -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, order=order))
    await world.join("a")
    machine = await world.lead()
    for tenant in ("t", "u", "t", "u"):
        await world.submit("alpha", tenant=tenant)
    await world.advance(1.0)
    await world.queue.pause(PauseKind.TENANT, "t")
    pulled = await world.pull("a", "alpha", 10)
    assert [each.key.tenant for each in pulled] == ["u", "u"]
    await world.settle()
    assert machine.board.open_groups == 0, "the planner hears of it"
    await world.advance(LATER_S)
    await world.submit("alpha", tenant="t")
    await world.advance(1.0)
    assert await waiting_on(world, UNASSIGNED) == {"alpha": 3}
    assert await waiting_on(world, "a") == {}
    assert (await world.queue.overview()).unplaced == 0

    await world.queue.resume(PauseKind.TENANT, "t")
    await world.advance(LATER_S)
    assert await waiting_on(world, "a") == {"alpha": 3}
    assert len(await world.pull("a", "alpha", 10)) == 3


async def test_a_new_leader_knows_what_is_paused() -> None:
    world = World()
    await world.join("a")
    await world.queue.pause(PauseKind.MODEL, "alpha")
    await world.submit("alpha")
    for _ in range(2):
        await world.lead()
        await world.advance(LATER_S)
        assert await waiting_on(world, UNASSIGNED) == {"alpha": 1}


async def test_nobody_is_advised_to_add_instances_for_what_is_paused() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.queue.pause(PauseKind.MODEL, "alpha")
    await world.submit("alpha", slo_s=1.0, count=200)
    await world.submit("beta")
    await world.advance(LATER_S)
    question = question_of(machine.board, machine.changes.table, machine.demand, world.now_s)
    assert question.models == ("beta",)
    assert sum(miss.waiting for miss in question.waiting) == 1
    assert question.unserved == 0


async def waiting_on(world: World, instance: str) -> dict[str, int]:
    """Requests that wait on a virtual queue, by model."""
    overview = await world.queue.overview()
    found: dict[str, int] = {}
    for group_id in await world.group_ids(instance):
        group = overview.groups[group_id]
        found[group.meta["model"]] = found.get(group.meta["model"], 0) + group.waiting
    return found
