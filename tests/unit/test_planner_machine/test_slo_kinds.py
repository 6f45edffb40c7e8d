"""The mix of SLO kinds in one queue, and SLOs at the limits."""

from __future__ import annotations

import math

import pytest

from qlm_core.request import SloKind

from .world import World


async def test_a_mix_of_kinds_in_one_queue() -> None:
    """Bands first; inside the band of SLOs by deadline, whatever the deadline bounds; kinds never share a group."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", priority=1)
    await world.submit("alpha", 300.0)
    await world.submit("alpha", 100.0, kind=SloKind.FIRST_TOKEN)
    await world.submit("alpha", priority=-1)
    await world.submit("alpha", 30.0)
    await world.submit("alpha", 900.0, kind=SloKind.FIRST_TOKEN)
    await world.submit("alpha", 900.0)
    await world.settle()
    order = [(group.band, group.traits.key.slo_kind, group.traits.slo_s) for group in machine.board.queue_groups("a")]
    priority, first, whole = SloKind.PRIORITY, SloKind.FIRST_TOKEN, SloKind.COMPLETION
    assert order[:4] == [(-1, priority, math.inf), (0, whole, 30.0), (0, first, 100.0), (0, whole, 300.0)]
    assert {each[1] for each in order[4:6]} == {first, whole}
    assert order[6] == (1, priority, math.inf)
    assert await world.group_ids("a") == machine.board.queues["a"]


async def test_tiny_slos_do_not_open_a_group_each() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    for _ in range(100):
        await world.submit("alpha", 0.001, prompt_tokens=1)
        world.now_s += 0.001
        await world.settle()
    assert len(machine.board.groups) < 15


@pytest.mark.parametrize("seconds", [5e-324, 1e-9, 1e9, 1e300, math.inf])
async def test_absurd_slos_are_placed(seconds: float) -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    [key, _] = await world.submit("alpha", seconds, count=2)
    await world.submit("alpha", 60.0)
    await world.advance(2.0)
    assert await world.state(key) == "PLACED"
    assert len(machine.board.queue_groups("a")) == 2
