"""Whatever happens: every request is placed exactly once, groups keep their limits, queues their bands, instances their models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestKey
from qlm_planner.machine.effects import Place
from qlm_planner.machine.events import ReplanRequested
from qlm_planner.policy import Policy
from queue_dump_memory import dump_memory

from .world import LEASE_S, MODELS, World

SERVES = {"a": ("alpha", "beta"), "b": ("beta", "gamma"), "c": MODELS}
GPUS = {"a": "big", "b": "small", "c": "small"}
DELTA = 0.2
"""Small groups, so that limits are reached."""

submits = st.tuples(
    st.just("submit"),
    st.sampled_from(MODELS),
    st.one_of(st.sampled_from([2.0, 30.0, 600.0]), st.integers(-2, 2)),
    st.integers(1, 60),
)
steps = st.lists(
    st.one_of(
        submits,
        submits,
        submits,
        st.tuples(st.just("serve"), st.sampled_from(sorted(SERVES)), st.integers(1, 60), st.integers(0, 60)),
        st.tuples(st.just("serve"), st.sampled_from(sorted(SERVES)), st.integers(1, 60), st.integers(0, 60)),
        st.tuples(st.just("kill"), st.sampled_from(sorted(SERVES))),
        st.tuples(st.just("join"), st.sampled_from(sorted(SERVES))),
        st.tuples(st.just("drain"), st.sampled_from(sorted(SERVES))),
        st.tuples(st.just("cancel"), st.integers(0, 200)),
        st.tuples(st.just("replan")),
        st.tuples(st.just("lead")),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.5, 4.0])),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.5, 4.0])),
    ),
    min_size=8,
    max_size=30,
)


async def drive(world: World, history: Sequence[tuple[object, ...]]) -> list[RequestKey]:
    keys: list[RequestKey] = []
    registered = {"a", "b"}
    for name in sorted(registered):
        await world.join(name, GPUS[name], SERVES[name])
    asks = 0
    for step in history:
        match step:
            case ("submit", str(model), float(slo_s), int(count)):
                keys += await world.submit(model, slo_s, count=count)
            case ("submit", str(model), int(priority), int(count)):
                keys += await world.submit(model, count=count, priority=priority)
            case ("serve", str(name), int(count), int(done)) if name in registered:
                queue = (await world.queues())[name]
                if queue:
                    pulled = await world.pull(name, queue[0], count)
                    await world.complete(name, pulled[:done])
            case ("kill", str(name)) if name in registered:
                registered.discard(name)
                await world.kill(name)
            case ("join", str(name)):
                registered.add(name)
                await world.join(name, GPUS[name], SERVES[name])
            case ("drain", str(name)) if name in registered:
                await world.drain(name, GPUS[name], SERVES[name])
            case ("cancel", int(number)) if keys:
                await world.cancel([keys[number % len(keys)]])
            case ("replan",):
                asks += 1
                await world.deliver(ReplanRequested(number=asks))
            case ("lead",):
                await world.lead()
            case ("wait", float(seconds)):
                await world.advance(seconds)
        await world.settle()
        await check(world)
    return keys


async def check(world: World) -> None:
    overview = await world.queue.overview()
    for queue in overview.virtual_queues:
        models = {overview.groups[group_id].meta["model"] for group_id in queue.group_ids}
        assert models <= set(SERVES.get(queue.instance, MODELS)), "an instance without the model never gets its groups"
    for group in overview.groups.values():
        assert group.live <= max(DELTA * 160, DELTA * 64), "delta x average batch"


@given(steps)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
def test_invariants(history: list[tuple[object, ...]]) -> None:
    async def run() -> None:
        world = World(Policy(lease_ttl_s=LEASE_S, delta=DELTA, group_min=1))
        await world.lead()
        keys = await drive(world, history)
        await world.advance(3 * LEASE_S)
        overview = await world.queue.overview()
        assert overview.unplaced == 0, "everything is placed"
        states = [await world.state(key) for key in keys]
        assert set(states) <= {"PLACED", "RUNNING", "COMPLETED", "CANCELLED"}
        assert sum(group.live for group in overview.groups.values()) == sum(state in ("PLACED", "RUNNING") for state in states)
        placed = [each.arrival.facts.queue_id for call in world.calls if isinstance(call, Place) for each in call.requests]
        assert len(placed) == len(set(placed)), "and once"
        members = [queue_id for group in dump_memory(world.queue).groups for queue_id in group.members]
        assert len(members) == len(set(members)), "in one group"
        for queue in overview.virtual_queues:
            if queue.instance == UNASSIGNED:
                continue
            bands = [int(overview.groups[group_id].meta["priority"]) for group_id in queue.group_ids]
            assert bands == sorted(bands), "bands before deadlines"
        machine = world.machine
        assert machine is not None
        assert machine.board.queues == {queue.instance: list(queue.group_ids) for queue in overview.virtual_queues}

    asyncio.run(run())
