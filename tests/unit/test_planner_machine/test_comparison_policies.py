"""Each comparison policy by what defines it (QLM section 8: EDF, vLLM's FCFS, SHEPHERD; and what load balancers do)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest

from qlm_core.operations.balancing import draw
from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestKey
from qlm_planner.config import PlannerSettings
from qlm_planner.machine.events import ReplanRequested
from qlm_planner.policies.balancers import Chance, LeastLoaded, PowerOfTwo, RoundRobin
from qlm_planner.policies.selection import baseline_of
from qlm_planner.policy import Order, Policy

from .test_arrival_order import served
from .world import LEASE_S, World

NAMES = ("a", "b", "c", "d")
OTHERS = [order for order in Order if order is not Order.SLO]


def world_of(order: Order, **settings: float) -> World:
    return World(Policy(lease_ttl_s=LEASE_S, order=order, **settings))  # type: ignore[arg-type]


async def register(world: World, names: Sequence[str] = NAMES) -> None:
    for name in names:
        await world.join(name)
    await world.lead()


async def waiting_on(world: World) -> Counter[str]:
    groups = (await world.queue.overview()).groups.values()
    found = Counter[str]()
    for group in groups:
        found[group.instance] += group.waiting
    return found


def test_every_policy_has_a_setting_and_slo_order_is_none_of_them() -> None:
    assert baseline_of(Policy()) is None
    for order in OTHERS:
        assert PlannerSettings(policy=order.value).policy is order
        assert baseline_of(Policy(order=order)) is not None


@pytest.mark.parametrize("order", OTHERS)
async def test_everything_is_placed_once_and_nothing_where_nobody_serves_it(order: Order) -> None:
    world = world_of(order)
    await world.join("a", models=["alpha"])
    await world.join("b", models=["alpha", "beta"])
    await world.lead()
    for number in range(30):
        await world.submit(("alpha", "beta", "gamma")[number % 3], slo_s=(30.0, 600.0)[number % 2])
        await world.settle()
    await world.submit("beta", priority=-3)
    await world.settle()
    found = await waiting_on(world)
    assert found.total() == 31
    assert found[UNASSIGNED] == 10
    assert "beta" not in (await world.queues())["a"]
    await world.join("c")
    await world.advance(2.0)
    assert (await waiting_on(world))[UNASSIGNED] == 0


@pytest.mark.parametrize("order", OTHERS)
async def test_a_lost_instance_loses_no_request(order: Order) -> None:
    world = world_of(order)
    await register(world, ("a", "b", "c"))
    keys: list[RequestKey] = []
    for number in range(40):
        keys += await world.submit(("alpha", "beta")[number % 2], slo_s=60.0 + number)
        await world.settle()
    await world.advance(LEASE_S + 1.0)
    await world.kill("b")
    await world.advance(2.0)
    assert sorted(await served(world, "a") + await served(world, "c")) == sorted(key.request_id for key in keys)
    await world.deliver(ReplanRequested(number=7))
    await world.advance(1.0)
    assert any(7 in change.replans for change in world.changes), "who asks is answered"


# Balancers ------------------------------------------------------------------------------------------------------------


async def test_balancers_group_like_requests_that_arrive_together() -> None:
    world = world_of(Order.LEAST_LOADED)
    await register(world, ["a"])
    assert world.machine is not None
    for model in ("alpha", "beta", "alpha"):
        await world.submit(model, count=3)
        await world.settle()
    groups = world.machine.board.queue_groups("a")
    assert [(group.traits.key.model, group.waiting) for group in groups] == [("alpha", 3), ("beta", 3), ("alpha", 3)]


async def test_round_robin_gives_each_instance_its_turn() -> None:
    world = world_of(Order.ROUND_ROBIN)
    await world.join("a", "small")
    await world.join("b", "big")
    await world.lead()
    await world.submit("alpha", count=100)
    await world.settle()
    assert await waiting_on(world) == {"a": 50, "b": 50}, "however fast they are"


def test_round_robin_goes_on_after_one_that_left() -> None:
    policy = RoundRobin()
    assert [policy.choose(NAMES, "", {}) for _ in range(5)] == ["a", "b", "c", "d", "a"]
    assert policy.choose(("a", "d"), "", {}) == "d"
    assert policy.choose(("a", "d"), "", {}) == "a"


def test_chance_is_even_and_the_same_for_the_same_seed() -> None:
    picks = [Chance(7).choose(NAMES, f"{number}-0", {}) for number in range(4000)]
    assert all(900 < count < 1100 for count in Counter(picks).values())
    assert picks == [Chance(7).choose(NAMES, f"{number}-0", {}) for number in range(4000)]
    assert picks != [Chance(8).choose(NAMES, f"{number}-0", {}) for number in range(4000)]


def test_power_of_two_takes_the_shorter_of_two_and_every_pair_comes() -> None:
    pairs = set[tuple[str, ...]]()
    for number in range(500):
        loads = {name: draw(1, f"{name}{number}", 9) % 100 for name in NAMES}
        pick = PowerOfTwo(3).choose(NAMES, f"{number}-0", loads)
        first = draw(3, f"{number}-0", 1) % 4
        second = (first + 1 + draw(3, f"{number}-0", 2) % 3) % 4
        assert first != second
        assert loads[pick] == min(loads[NAMES[first]], loads[NAMES[second]])
        pairs.add(tuple(sorted((NAMES[first], NAMES[second]))))
    assert pairs == set(itertools.combinations(NAMES, 2))
    assert PowerOfTwo(3).choose(("a",), "1-0", {"a": 9}) == "a"


async def test_groups_of_a_lost_instance_go_where_the_fewest_requests_are() -> None:
    world = world_of(Order.LEAST_LOADED)
    await world.join("a", models=["alpha"])
    await world.join("b", models=["beta"])
    await world.join("c", models=["gamma"])
    await world.lead()
    for model, count in (("alpha", 30), ("beta", 5), ("gamma", 10)):
        await world.submit(model, count=count)
    await world.settle()
    for name in ("a", "b"):
        await world.join(name)
    await world.advance(LEASE_S + 1.0)
    await world.kill("c")
    await world.advance(2.0)
    assert await waiting_on(world) == Counter(a=30, b=15)


async def test_the_least_loaded_keeps_a_model_where_it_is_until_others_have_clearly_less() -> None:
    world = world_of(Order.LEAST_LOADED)
    await register(world, ("a", "b"))
    for model, count in (("alpha", 20), ("beta", 30), ("alpha", 40), ("beta", 5)):
        await world.submit(model, slo_s=3600.0, count=count)
        await world.settle()
        if model == "alpha" and count == 20:
            assert len(await world.pull("b", "alpha", 10)) == 10
            await world.settle()
    queues = await world.queues()
    assert [len(dict.fromkeys(queue)) for queue in queues.values()].count(2) <= 1, "one of them serves nothing but alpha"


def test_an_instance_without_the_model_is_taken_where_the_others_are_clearly_more_loaded() -> None:
    assert LeastLoaded().choose(NAMES, "", {"a": 70, "b": 10, "c": 9, "d": 60}, ("a", "d")) == "d", "51 more"
    assert LeastLoaded().choose(NAMES, "", {"a": 80, "b": 10, "c": 9, "d": 80}, ("a", "d")) == "c", "71 more, and 8 times as many"
    assert LeastLoaded().choose(NAMES, "", {"a": 280, "b": 210, "c": 209, "d": 280}, ("a",)) == "a", "71 more, but 1.3 times as many"


# Batched --------------------------------------------------------------------------------------------------------------


async def test_batched_serves_a_model_after_the_other_and_each_in_the_order_of_arrival() -> None:
    world = world_of(Order.BATCHED)
    await register(world, ["a"])
    keys: dict[str, list[str]] = {"alpha": [], "beta": [], "gamma": []}
    for number in range(18):
        model = ("beta", "alpha", "gamma")[number % 3]
        [key] = await world.submit(model, slo_s=(600.0, 5.0)[number % 2])
        keys[model].append(key.request_id)
        await world.settle()
    assert await served(world, "a") == [*keys["beta"], *keys["alpha"], *keys["gamma"]]


async def test_nobody_is_overtaken_by_arrivals_after_the_stay() -> None:
    world = world_of(Order.BATCHED, stay_s=10.0)
    await register(world, ["a"])
    for model in ("alpha", "beta"):
        await world.submit(model, slo_s=600.0)
        await world.settle()
    await world.advance(9.0)
    await world.submit("alpha", slo_s=600.0)
    await world.settle()
    assert (await world.queues())["a"] == ["alpha", "beta"]
    await world.advance(2.0)
    await world.submit("alpha", slo_s=600.0)
    await world.settle()
    assert (await world.queues())["a"] == ["alpha", "beta", "alpha"]


async def test_batched_stays_with_the_running_model() -> None:
    """Nobody of the model waits, and others do: its requests still go on until the others have waited for long."""
    world = world_of(Order.BATCHED, stay_s=10.0)
    await register(world, ["a"])
    await world.submit("alpha", slo_s=600.0)
    await world.settle()
    assert len(await world.pull("a", "alpha", 1)) == 1
    await world.settle()
    await world.submit("beta", slo_s=600.0)
    await world.submit("alpha", slo_s=600.0)
    await world.settle()
    assert (await world.queues())["a"] == ["alpha", "beta"]
    await world.pull("a", "alpha", 1)
    await world.advance(11.0)
    await world.submit("alpha", slo_s=600.0)
    await world.settle()
    assert (await world.queues())["a"] == ["beta", "alpha"]


async def test_batched_spreads_one_model_evenly_and_keeps_others_apart() -> None:
    world = world_of(Order.BATCHED)
    await register(world, ("a", "b"))
    await world.submit("alpha", slo_s=3600.0, count=40)
    await world.settle()
    assert await waiting_on(world) == {"a": 20, "b": 20}
    await world.submit("beta", slo_s=3600.0, count=30)
    await world.settle()
    assert sorted((await waiting_on(world)).values()) == [20, 50], "one swap, not two"


# EDF ------------------------------------------------------------------------------------------------------------------


async def test_edf_serves_by_deadline_whatever_the_model() -> None:
    """Deadlines that alternate between two models swap at every group (QLM section 2.4, insight 3)."""
    world = world_of(Order.EDF)
    await register(world, ("a",))
    keys: list[RequestKey] = []
    for number in range(12):
        keys += await world.submit(("alpha", "beta")[number % 2], slo_s=900.0 - 30.0 * number)
        await world.settle()
    assert await served(world, "a") == [key.request_id for key in reversed(keys)]
    assert (await world.queues())["a"] == ["beta", "alpha"] * 6


async def test_edf_keeps_bands_and_gives_work_to_an_instance_that_joins() -> None:
    world = world_of(Order.EDF)
    await register(world, ("a",))
    for number in range(20):
        await world.submit(("alpha", "beta")[number % 2], slo_s=100.0 + 20.0 * number, count=20)
        await world.settle()
    [urgent] = await world.submit("gamma", priority=-1)
    await world.settle()
    assert (await served(world, "a"))[0] == urgent.request_id
    await world.join("b")
    await world.advance(2.0)
    assert (await waiting_on(world))["b"] > 100


async def test_edf_groups_hold_deadlines_that_are_near_each_other() -> None:
    """At most half of the SLO apart."""
    world = world_of(Order.EDF)
    await register(world, ("a",))
    sizes = []
    for _ in range(3):
        await world.submit("alpha", slo_s=60.0)
        await world.settle()
        sizes.append([each.waiting for each in (await world.queue.overview()).groups.values()])
        await world.advance(20.0)
    assert sizes == [[1], [2], [2, 1]]


# SHEPHERD -------------------------------------------------------------------------------------------------------------


async def test_nobody_joins_a_batch_that_runs() -> None:
    world = world_of(Order.SHEPHERD)
    await register(world, ("a",))
    await world.submit("alpha", slo_s=3600.0, count=5)
    await world.settle()
    await world.submit("alpha", slo_s=3600.0, count=2)
    await world.settle()
    assert [each.live for each in (await world.queue.overview()).groups.values()] == [7]
    assert len(await world.pull("a", "alpha", 1)) == 1
    await world.settle()
    await world.submit("alpha", slo_s=3600.0)
    await world.settle()
    assert sorted(each.live for each in (await world.queue.overview()).groups.values()) == [1, 7]


async def test_shepherd_makes_batches_of_a_fixed_size() -> None:
    world = world_of(Order.SHEPHERD)
    await register(world, ("a",))
    machine = world.machine
    assert machine is not None
    await world.submit("alpha", slo_s=3600.0, count=700)
    await world.settle()
    sizes = sorted(group.waiting for group in machine.board.groups.values())
    assert len(set(sizes[1:])) == 1, "all but the last are full"
    slot, group = machine.board.slots["a"], next(iter(machine.board.groups.values()))
    limits = machine.estimates.limits(slot, group.traits.key, 3600.0, 200.0)
    assert sizes[-1] == int(limits.live / world.policy.delta)
