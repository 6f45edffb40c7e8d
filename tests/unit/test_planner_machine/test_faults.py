"""Lost answers, lost calls, lost planners: nothing is lost with them, and nothing is placed twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from qlm_planner.machine.effects import Call, Place
from qlm_planner.machine.events import Tick
from qlm_planner.policy import Policy

from .world import LEASE_S, World

KINDS = ("Place", "ApplyChunk", "ReadOverview", "ReadUnplaced", "ReadArrivals", "ReadEvents", "Reclaim", "Expire", "Forget")


def once(kind: str, when: str) -> Callable[[Call], str]:
    """Each second call of a kind fails, the first one too."""
    count = 0

    def fault(call: Call) -> str:
        nonlocal count
        if type(call).__name__ == kind:
            count += 1
            return when if count % 2 else ""
        return ""

    return fault


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_call_may_fail(kind: str, when: str) -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, forget_after_s=5.0))
    world.faults = once(kind, when)
    await world.join("a", models=["alpha"])
    await world.lead()
    keys = await world.submit("alpha", slo_s=600.0, count=30)
    keys += await world.submit("beta", slo_s=600.0, count=30)
    await world.advance(LEASE_S + 2.0)
    pulled = await world.pull("a", "alpha", 10)
    assert len(pulled) == 10
    await world.kill("a")
    await world.join("b")
    keys += await world.submit("alpha", slo_s=600.0, count=30, expire_after_s=1e5)
    await world.advance(30.0)
    overview = await world.queue.overview()
    assert {await world.state(key) for key in keys} == {"PLACED"}
    assert sum(group.waiting for group in overview.groups.values() if group.instance == "b") == 90
    assert {queue.instance for queue in overview.virtual_queues} == {"b", "unassigned"}
    machine = world.machine
    assert machine is not None
    assert {name: group.waiting for name, group in machine.board.groups.items()} == {
        name: group.waiting for name, group in overview.groups.items()
    }


async def test_failed_calls_are_repeated_with_growing_pauses() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    times: list[float] = []

    def fault(call: Call) -> str:
        if isinstance(call, Place):
            times.append(world.now_s)
            return "before"
        return ""

    await world.advance(1.0)
    world.faults = fault
    await world.submit()
    await world.advance(6.0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[:3] == pytest.approx([0.05, 0.1, 0.2], abs=1e-3)
    assert 0.5 < max(pauses) <= world.policy.retry_max_s + 1e-3
    assert machine.wake_s > world.now_s


async def test_a_new_leader_finds_what_the_old_one_had_read() -> None:
    world = World()
    await world.join("a")
    await world.lead()
    world.faults = lambda call: "before" if isinstance(call, Place) else ""
    keys = await world.submit(count=700)
    await world.settle()
    world.faults = lambda call: ""
    unread = await world.submit(count=700)
    machine = await world.lead()
    assert machine.caught_up
    assert {await world.state(key) for key in keys + unread} == {"PLACED"}
    await world.advance(5.0)
    assert sum(group.waiting for group in machine.board.groups.values()) == 1400
    assert all(group_id.startswith("g2-") for group_id in machine.board.groups)


@pytest.mark.parametrize("seed", range(5))
async def test_random_faults(seed: int) -> None:
    """A tenth of all calls fail; agents pull, finish, die and come back; leaders follow each other."""
    chance = random.Random(seed)
    world = World(Policy(lease_ttl_s=LEASE_S))
    world.faults = lambda call: chance.choice(("before", "after")) if chance.random() < 0.1 else ""
    await world.join("a")
    await world.join("b", "small", ["alpha", "beta"])
    await world.lead()
    keys = []
    for _ in range(60):
        match chance.randrange(8):
            case 0 | 1 | 2:
                model = chance.choice(("alpha", "beta", "gamma"))
                keys += await world.submit(model, chance.choice((5.0, 60.0, 3600.0)), count=chance.randrange(1, 30))
            case 3 | 4:
                name, model = chance.choice(("a", "b")), chance.choice(("alpha", "beta", "gamma"))
                if next(each for each in (await world.queue.overview()).instances if each.name == name).alive:
                    pulled = await world.pull(name, model, chance.randrange(1, 20))
                    await world.complete(name, pulled[: chance.randrange(len(pulled) + 1)])
            case 5:
                await world.kill(chance.choice(("a", "b")))
            case 6:
                name = chance.choice(("a", "b"))
                await world.join(name, "big" if name == "a" else "small", ["alpha", "beta", "gamma"] if name == "a" else ["alpha", "beta"])
            case 7:
                await world.lead()
        await world.advance(chance.choice((0.0, 0.01, 0.3, 2.0)))
    world.faults = lambda call: ""
    await world.join("a")
    await world.join("b", "small", ["alpha", "beta"])
    await world.advance(30.0)
    await world.deliver(Tick())
    overview = await world.queue.overview()
    assert overview.unplaced == 0
    live = [key for key in keys if await world.state(key) in ("PLACED", "RUNNING")]
    assert overview.live == len(live)
    machine = world.machine
    assert machine is not None
    assert machine.board.queues == {queue.instance: list(queue.group_ids) for queue in overview.virtual_queues}
    assert {name: (group.waiting, group.live) for name, group in machine.board.groups.items()} == {
        name: (group.waiting, group.live) for name, group in overview.groups.items()
    }
    on_b = {overview.groups[group_id].meta["model"] for group_id in machine.board.queues["b"]}
    assert "gamma" not in on_b
