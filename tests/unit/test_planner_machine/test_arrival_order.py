"""The baseline: first come first served on every instance (`planner.policy: fcfs`)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestKey
from qlm_planner.machine.effects import ApplyChunk
from qlm_planner.machine.events import ReplanRequested
from qlm_planner.policies.queue_work import Works
from qlm_planner.policy import Order, Policy
from qlm_queue.values import BATCH_MAX

from .test_cheapest_place import class_table, group, slot
from .world import LEASE_S, World

FCFS = Policy(lease_ttl_s=LEASE_S, order=Order.FCFS)


async def served(world: World, name: str) -> list[str]:
    """Request ids in the order in which a queue would be served."""
    ids: list[str] = []
    for group_id in await world.group_ids(name):
        ids += [request.key.request_id for request in await world.queue.waiting(group_id, 0, BATCH_MAX)]
    return ids


def in_order(ids: Sequence[str]) -> bool:
    numbers = [int(request_id[1:]) for request_id in ids]
    return numbers == sorted(numbers)


async def test_requests_are_served_as_they_arrive_whatever_they_want() -> None:
    """Urgent or not, with any model or priority: each waits behind all that arrived before it."""
    world = World(FCFS)
    await world.join("a")
    await world.lead()
    keys: list[RequestKey] = []
    for model, slo_s in (("alpha", 600.0), ("beta", 600.0), ("beta", 600.0), ("alpha", 600.0), ("alpha", 2.0)):
        keys += await world.submit(model, slo_s)
        await world.settle()
    keys += await world.submit("gamma", priority=-5)
    keys += await world.submit("alpha", 600.0)
    await world.settle()
    assert await served(world, "a") == [key.request_id for key in keys]
    # Alike and next to each other they share a group.
    assert (await world.queues())["a"] == ["alpha", "beta", "alpha", "alpha", "gamma", "alpha"]


async def test_a_batch_of_mixed_arrivals_keeps_its_order() -> None:
    world = World(FCFS)
    await world.join("a")
    machine = await world.lead()
    chance = random.Random(1)
    keys: list[RequestKey] = []
    for _ in range(300):
        keys += await world.submit(chance.choice(("alpha", "beta")), chance.choice((5.0, 600.0)))
    await world.settle()
    assert await served(world, "a") == [key.request_id for key in keys]
    assert machine.board.queues["a"] == await world.group_ids("a")


async def test_a_request_goes_to_the_instance_that_would_start_it_first() -> None:
    """The queue's length counts in time, with the swap that the model needs, not in requests."""
    world = World(FCFS)
    await world.join("a", "big")
    await world.join("b", "small")
    await world.lead()
    await world.submit("alpha", count=2000)
    await world.settle()
    groups = (await world.queue.overview()).groups.values()
    waiting = {name: sum(each.waiting for each in groups if each.instance == name) for name in ("a", "b")}
    assert waiting["a"] + waiting["b"] == 2000
    assert waiting["a"] == pytest.approx(2 * waiting["b"], rel=0.2), "the big one is twice as fast"


async def test_models_are_swapped_whenever_the_next_request_wants_another() -> None:
    world = World(FCFS)
    await world.join("a")
    await world.lead()
    for number in range(40):
        await world.submit(("alpha", "beta")[number % 2], slo_s=30.0)
        await world.settle()
    models = (await world.queues())["a"]
    assert sum(before != after for before, after in itertools.pairwise(models)) == 39


async def test_no_replan_for_misses_idle_instances_or_on_request() -> None:
    world = World(FCFS)
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", slo_s=1.0, count=3000)
    await world.submit("beta", slo_s=1.0, count=100)
    await world.settle()
    before = await world.group_ids("a")
    await world.join("b")
    await world.advance(10.0)
    assert machine.changes.predicted.late > 100
    await world.deliver(ReplanRequested(number=3))
    await world.advance(1.0)
    assert await world.group_ids("a") == before
    assert [change.replans for change in world.changes if change.replans] == [{3: 0}]
    assert not [call for call in world.calls if isinstance(call, ApplyChunk)]


async def test_requests_of_a_lost_instance_move_by_age() -> None:
    world = World(FCFS)
    await world.join("a")
    await world.join("b")
    await world.lead()
    keys: list[RequestKey] = []
    for number in range(60):
        keys += await world.submit(("alpha", "beta", "gamma")[number % 3], slo_s=(600.0, 5.0)[number % 2])
        await world.settle()
    assert await served(world, "a")
    assert await served(world, "b")
    await world.advance(LEASE_S + 1.0)
    await world.kill("a")
    await world.advance(2.0)
    moved = await served(world, "b")
    assert sorted(moved) == sorted(key.request_id for key in keys)
    assert in_order(moved), "every group stands between those older and younger"


async def test_unassigned_requests_wait_by_age() -> None:
    world = World(FCFS)
    await world.join("a", models=["alpha"])
    await world.lead()
    keys = await world.submit("beta", 600.0) + await world.submit("gamma", 2.0) + await world.submit("beta", 5.0)
    await world.settle()
    assert await served(world, UNASSIGNED) == [key.request_id for key in keys]
    await world.join("b")
    await world.advance(1.0)
    assert await served(world, "b") == [key.request_id for key in keys]


@pytest.mark.parametrize("order", [Order.FCFS, Order.EDF, Order.SLO])
async def test_a_group_is_no_larger_than_under_slo_order(order: Order) -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, order=order, delta=1.0))
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", slo_s=36_000.0, count=500)
    await world.settle()
    assert max(each.waiting for each in machine.board.groups.values()) < 170


@pytest.mark.parametrize("active", ["", "alpha", "beta"])
@pytest.mark.parametrize("models", [("alpha",), ("beta", "alpha"), ("alpha", "beta", "alpha"), ()])
def test_the_end_of_a_queue_is_its_work_and_its_swaps(active: str, models: Sequence[str]) -> None:
    works, on = Works(table=class_table()), slot("a", active=active)
    queue = works.stand(on, [group(number, model, 600.0, 400) for number, model in enumerate(models)])
    swaps = [before != after for before, after in itertools.pairwise((active, *models))]
    busy_s = 10.0 * sum(swaps) + sum(work.work_s for work in queue.works)
    for model in ("alpha", "beta"):
        [[new]] = works.on([on], [group(99, model, 600.0, 1)])
        assert queue.start_s(len(models), new) == pytest.approx(busy_s + 10.0 * (model != (active, *models)[-1]))
