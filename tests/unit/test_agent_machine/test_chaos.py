"""A machine in a world that loses answers, leases and progress, by seed: every request ends exactly once, its output whole, however often
it made way for others."""

from __future__ import annotations

import pytest

from qlm_agent.decisions.events import DrainCommand, OtherLoad
from qlm_agent.decisions.machine import Life

from .world import DISPLACEMENTS_MAX, World


@pytest.mark.parametrize("seed", range(150))
def test_every_request_ends_once_and_whole(seed: int) -> None:
    world = World(seed)
    world.run(until_s=600.0)
    for request in world.requests:
        assert request.ended, f"seed {seed}: {request}"
        if "/" in request.ended:
            assert request.progress == request.target, f"seed {seed}: {request}"
        assert request.evictions <= DISPLACEMENTS_MAX, f"seed {seed}: {request}"
    assert world.machine.runs.held_tokens == 0
    assert world.machine.runs.kv_reserved == 0
    assert world.machine.runs.running == 0


@pytest.mark.parametrize("seed", range(200, 230))
def test_others_that_come_and_go_hold_up_nobody_for_ever(seed: int) -> None:
    world = World(seed)
    for at_s in range(1, 60):
        runs = world.random.randrange(12) if at_s % 5 else 0
        world.later(OtherLoad(runs=runs, kv_tokens=600 * runs), float(at_s))
    world.later(OtherLoad(runs=0, kv_tokens=0), 60.0)
    world.run(until_s=600.0)
    assert all(request.ended for request in world.requests), f"seed {seed}"


def test_the_seeds_meet_each_operation() -> None:
    worlds = [World(seed) for seed in range(40)]
    for world in worlds:
        world.run(until_s=600.0)
    operations = [world.machine.operations for world in worlds]
    assert sum(each.evictions for each in operations) > 20
    assert sum(each.kv_offloads for each in operations) > 5
    assert sum(each.kv_restores for each in operations) > 5
    assert sum(each.unpulls for each in operations) > 5


@pytest.mark.parametrize("seed", range(150, 200))
def test_a_drain_in_the_middle_leaves_nothing_owned(seed: int) -> None:
    world = World(seed)
    world.later(DrainCommand(finish_s=0.2, stop=True), world.random.uniform(0.1, 2.0))
    world.run(until_s=600.0)
    assert world.machine.life is Life.STOPPED or all(request.ended for request in world.requests)
    if world.loss == 0.0 and world.trouble == 0.0:
        assert all(request.ended or not request.owner for request in world.requests), f"seed {seed}"
