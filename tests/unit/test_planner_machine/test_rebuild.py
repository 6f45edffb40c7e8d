"""A machine that is rebuilt from the queue decides like the one that lived on."""

from __future__ import annotations

import random

import pytest

from qlm_planner.board.group import order_of
from qlm_planner.machine.effects import Effect, Place
from qlm_planner.machine.events import ArrivalsRead, LoadReported, OverviewRead, ProfilesRead, UnplacedRead
from qlm_planner.machine.step import PlannerMachine
from qlm_planner.policy import Policy
from qlm_planner.shell.queue_calls import arrivals_of, snapshot_of
from qlm_queue.values import LiveRequest

from .world import CATALOGUE, LEASE_S, World

NEW = 1000
QUIET = Policy(lease_ttl_s=LEASE_S, overview_every_s=1e6, overview_every_max_s=1e6, replan_every_s=1e6)


def decisions(effects: list[Effect]) -> list[tuple[str, str, str, str]]:
    """For each request: its group, where that is, and what it stands before; groups that are new by their order of making."""
    [place] = [effect for effect in effects if isinstance(effect, Place)]

    def known(group_id: str) -> str:
        fence, number = order_of(group_id)
        return group_id if (fence, number) < (1, NEW) else f"new-{number % NEW}"

    opening = {group.group_id: group for group in place.groups}
    return [
        (
            each.arrival.facts.queue_id,
            known(each.group_id),
            opening[each.group_id].instance,
            known(opening[each.group_id].before) if opening[each.group_id].before else "",
        )
        for each in place.requests
    ]


@pytest.mark.parametrize("seed", range(4))
async def test_rebuilt_and_lived_on_decide_alike(seed: int) -> None:
    chance = random.Random(seed)
    world = World(QUIET)
    incarnations = [await world.join("a"), await world.join("b", "small")]
    lived = await world.lead()
    for _ in range(30):
        model, slo_s = chance.choice(("alpha", "beta", "gamma")), chance.choice((30.0, 120.0, 3600.0))
        await world.submit(model, slo_s, count=chance.randrange(1, 40), prompt_tokens=chance.choice((50, 200, 900)))
        await world.settle()
        name = chance.choice(("a", "b"))
        if queue := (await world.queues())[name]:
            pulled = await world.pull(name, queue[0], chance.randrange(30))
            await world.complete(name, pulled[::2])
        await world.advance(chance.random())
    loads = [LoadReported(incarnation=each, active_model="beta", warm_models=("alpha",)) for each in incarnations]
    for load in loads:
        await world.deliver(load)
    assert lived._assignment.opened < NEW
    lived._assignment.opened = NEW  # so that old groups and new ones are distinct

    rebuilt = PlannerMachine(QUIET, 2, world.now_s)
    rebuilt.step(world.now_s, ProfilesRead(catalogue=CATALOGUE, profiles=world.snapshot))
    rebuilt.step(world.now_s, OverviewRead(snapshot=snapshot_of(await world.queue.overview())))
    rebuilt.step(world.now_s, UnplacedRead(arrivals=(), read_to=""))
    for load in loads:
        rebuilt.step(world.now_s, load)
    lives, reads = (
        {name: (group.waiting, group.live, group.first_deadline_s, group.last_deadline_s) for name, group in machine.board.groups.items()}
        for machine in (lived, rebuilt)
    )
    assert lives == reads
    assert lived.board.queues == rebuilt.board.queues
    assert {key: group.group_id for key, group in lived.board.newest.items()} == {
        key: group.group_id for key, group in rebuilt.board.newest.items()
    }

    keys = []
    for model in ("alpha", "beta", "gamma"):
        for slo_s in (30.0, 120.0, 3600.0):
            keys += await world.submit(model, slo_s, count=3)
    found = [request for key in keys if isinstance(request := await world.queue.find(key), LiveRequest)]
    arrivals, _ = arrivals_of(found)
    of_lived = decisions(lived.step(world.now_s, ArrivalsRead(arrivals=arrivals)))
    of_rebuilt = decisions(rebuilt.step(world.now_s, ArrivalsRead(arrivals=arrivals)))
    assert len(of_lived) == 27
    assert of_lived == of_rebuilt
