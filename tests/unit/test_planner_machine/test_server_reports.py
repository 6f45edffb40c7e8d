"""SAL and least KV on the planner's board: heartbeats of agents, corrected by what the board knows since."""

from __future__ import annotations

from collections import Counter

import pytest

from qlm.api.v1 import instance_pb2, planner_pb2
from qlm_planner.board.slot import EngineLoad
from qlm_planner.machine.events import LoadReported
from qlm_planner.policy import Order
from qlm_planner.shell.rpc import load_reported

from .test_comparison_policies import register, waiting_on, world_of
from .world import World


async def report(world: World, name: str, **figures: float) -> None:
    load = EngineLoad(kv_capacity_tokens=40_000, **figures)  # type: ignore[arg-type]
    await world.deliver(LoadReported(incarnation=world.agents[name][0], active_model="alpha", engine=load))


@pytest.mark.parametrize(
    ("order", "a", "b", "takes"),
    [
        (Order.SAL, {"prefill_left_tokens": 9_000}, {"kv_used_tokens": 20_000}, "b"),
        (Order.LEAST_KV, {"prefill_left_tokens": 9_000}, {"kv_used_tokens": 20_000}, "a"),
        (Order.SAL, {"prefill_left_tokens": 9_000}, {"kv_used_tokens": 60_000, "token_s": 0.05}, "a"),
        (Order.SAL, {"prefill_left_tokens": 9_000}, {"kv_used_tokens": 40_001, "token_s": 0.0001}, "b"),
    ],
)
async def test_a_heartbeat_decides(order: Order, a: dict[str, float], b: dict[str, float], takes: str) -> None:
    """Prompts that wait in an engine, and KV that is not free: at 20 tokens a second the second server needs longer for it than the first
    one for its prompts; at 10,000 it does not."""
    world = world_of(order)
    await register(world, ("a", "b"))
    await report(world, "a", **a)
    await report(world, "b", **b)
    await world.submit("alpha")
    await world.settle()
    assert await waiting_on(world) == Counter({takes: 1})


@pytest.mark.parametrize("order", [Order.SAL, Order.LEAST_KV])
async def test_requests_are_spread_before_the_next_heartbeat(order: Order) -> None:
    world = world_of(order)
    await register(world)
    await world.submit("alpha", count=40)
    await world.settle()
    for _ in range(10):
        await world.submit("alpha", count=1)
        await world.settle()
    assert sorted((await waiting_on(world)).values()) == [12, 12, 13, 13]


async def test_pulled_prompts_count_until_the_next_heartbeat() -> None:
    world = world_of(Order.LEAST_KV)
    await register(world, ("a", "b"))
    for expected in ({"a": 1}, {"b": 1}, {"a": 1, "b": 1}):
        await world.submit("alpha")
        await world.settle()
        assert await waiting_on(world) == Counter(expected), "pulled prompts count before their agent reports them"
        await world.pull("a", "alpha", 1)
        await world.settle()
    for name in ("a", "b"):
        await report(world, name)
    await world.submit("alpha")
    await world.settle()
    assert await waiting_on(world) == Counter(a=1, b=1), "those on the first one have ended by then"


async def test_a_model_swap_counts_as_waiting() -> None:
    world = world_of(Order.SAL)
    await register(world, ("a", "b"))
    await report(world, "a", prefill_left_tokens=1_000)
    await world.deliver(LoadReported(incarnation=world.agents["b"][0], active_model="beta"))
    await world.submit("alpha")
    await world.settle()
    assert await waiting_on(world) == Counter(a=1)


@pytest.mark.parametrize(
    ("token_s", "read_s"), [(0.02, 0.02), (0.0, 0.0), (-1.0, 0.0), (1e-9, 0.0), (float("nan"), 0.0), (float("inf"), 0.0)]
)
def test_a_heartbeat_is_read_with_sense(token_s: float, read_s: float) -> None:
    load = instance_pb2.InstanceLoad(kv_used_tokens=5, kv_capacity_tokens=9, prefill_left_tokens=3, token_s=token_s, swapping_to="beta")
    found = load_reported(planner_pb2.HeartbeatRequest(incarnation="a/1", load=load))
    assert found.active_model == "beta"
    assert found.engine == EngineLoad(kv_used_tokens=5, kv_capacity_tokens=9, prefill_left_tokens=3, token_s=read_s)
