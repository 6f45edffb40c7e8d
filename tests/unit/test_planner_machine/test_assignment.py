"""Request groups: algorithm 1 of the QLM paper, as requests arrive."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from qlm_core.vocabulary.request import SloKind
from qlm_planner.board.group import from_meta, group_id_of, order_of, to_meta
from qlm_planner.machine.effects import Place
from qlm_planner.policy import Policy
from qlm_queue.values import Owned

from .test_cheapest_place import group
from .world import LEASE_S, MODELS, World, hardware


async def sizes(world: World) -> list[int]:
    overview = await world.queue.overview()
    return [overview.groups[group_id].waiting for group_id in sorted(overview.groups, key=order_of)]


async def test_a_group_holds_delta_average_batches() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", slo_s=36_000.0, count=1500)
    await world.settle()
    found = next(iter(machine.board.groups.values()))
    limits = machine.estimates.limits(machine.board.slots["a"], found.traits.key, found.traits.slo_s, 200.0)
    # 40,000 tokens of KV, and agents keep room for 200 prompt + 100 output tokens each: 133 at once.
    assert limits.live == pytest.approx(4 * 133, rel=0.1)
    assert await sizes(world) == [limits.live, limits.live, 1500 - 2 * limits.live]


async def test_the_batch_is_that_of_the_instance_where_the_group_stands() -> None:
    """Not that of another one: room for 13 at once, of 300 tokens each, in the KV of the one that serves the model."""
    world = World()
    kv_tokens = {"big": 40_000, "small": 4_000}
    rows = tuple(hardware(gpu, model, kv_tokens=tokens) for gpu, tokens in kv_tokens.items() for model in MODELS)
    world.snapshot = replace(world.snapshot, hardware=rows)
    await world.join("a", "big", ("beta",))
    await world.join("b", "small", ("alpha",))
    await world.lead()
    await world.submit("alpha", slo_s=36_000.0, count=300)
    await world.settle()
    assert max(await sizes(world)) == pytest.approx(4 * 13, rel=0.1)


async def test_a_group_is_served_within_its_share_of_the_slo() -> None:
    """20 s class: 5 s of service at about 21 ms a request."""
    world = World()
    await world.join("a")
    await world.lead()
    await world.submit("alpha", slo_s=20.0, count=1000)
    await world.settle()
    assert 150 < max(await sizes(world)) < 300


async def test_deadlines_in_a_group_are_close_together() -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, group_spread_fraction=0.5))
    await world.join("a")
    machine = await world.lead()
    for _ in range(10):
        await world.submit("alpha", slo_s=60.0)
        await world.advance(10.0)
    assert await sizes(world) == [4, 4, 2]
    groups = sorted(machine.board.groups.values(), key=lambda group: group.order)
    assert [round(after.first_deadline_s - before.first_deadline_s) for before, after in itertools.pairwise(groups)] == [40, 40]


async def test_traits_make_requests_different() -> None:
    """Model, SLO kind and class, prompt length class, priority."""
    world = World()
    await world.join("a")
    await world.lead()
    await world.submit("alpha", 60.0, prompt_tokens=200)
    await world.submit("alpha", 50.0, prompt_tokens=100)  # the same classes
    for different in (
        world.submit("beta", 60.0),
        world.submit("alpha", 600.0),
        world.submit("alpha", 60.0, prompt_tokens=2000),
        world.submit("alpha", 60.0, kind=SloKind.FIRST_TOKEN),
        world.submit("alpha", priority=1),
        world.submit("alpha", priority=2),
    ):
        await different
    await world.settle()
    assert await sizes(world) == [2, 1, 1, 1, 1, 1, 1]


async def test_the_first_and_the_last_deadline_count_for_the_group() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    for slo_s in (50.0, 40.0, 60.0, 45.0):
        await world.submit("alpha", slo_s)
        await world.settle()
    [found] = machine.board.groups.values()
    record = (await world.queue.overview()).groups[found.group_id]
    for each in (found, record):
        assert (each.first_deadline_s, each.last_deadline_s) == pytest.approx((world.now_s + 40.0, world.now_s + 60.0))
    assert found.spread_s == pytest.approx(20.0)


async def test_deadlines_of_those_that_are_pulled_do_not_count_for_those_that_wait() -> None:
    """They are taken to lie evenly until an overview states them; one that returns may be the first of all."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    began_s = world.now_s
    for _ in range(5):
        await world.submit("alpha", 40.0)
        await world.settle()
        await world.advance(1.0)
    [found] = machine.board.groups.values()
    pulled = await world.pull("a", "alpha", 2)
    await world.settle()
    assert (found.first_deadline_s, found.next_deadline_s, found.last_deadline_s) == pytest.approx(
        (began_s + 40.0, began_s + 42.0, began_s + 44.0), abs=0.3
    )
    await world.advance(20.0)
    [found] = machine.board.groups.values()
    record = (await world.queue.overview()).groups[found.group_id]
    assert found.next_deadline_s == record.next_deadline_s == pytest.approx(began_s + 42.0, abs=0.3)
    back = Owned(queue_id=pulled[0].queue_id, key=pulled[0].key, attempt=pulled[0].attempt)
    await world.queue.unpull(world.agents["a"][0], [back])
    await world.settle()
    [found] = machine.board.groups.values()
    assert found.next_deadline_s == found.first_deadline_s == pytest.approx(began_s + 40.0, abs=0.3)


async def test_new_groups_stand_where_the_machine_put_them() -> None:
    """Several groups of one call, in front of each other: the queue has the machine's order."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    for slo_s in (500.0, 60.0, 3000.0, 30.0, 200.0):
        await world.submit("alpha", slo_s)
        await world.submit("beta", slo_s)
    world.calls.clear()
    await world.settle()
    assert len([call for call in world.calls if isinstance(call, Place)]) == 1
    assert len(machine.board.queues["a"]) == 10
    assert machine.board.queues["a"] == await world.group_ids("a")


def test_ids_never_repeat_across_leaders() -> None:
    assert group_id_of(3, 7) == "g3-7"
    assert order_of("g3-7") == (3, 7)
    assert order_of("g2-900") < order_of("g3-1")
    assert order_of("something") == (0, 0)


@pytest.mark.parametrize("made", [group(1, "alpha", 60.0), group(2, "beta", 0.0, priority=-3)])
def test_meta_states_everything_after_a_restart(made: object) -> None:
    traits = made.traits  # type: ignore[attr-defined]
    assert from_meta(to_meta(traits, 0)) == traits


def test_meta_of_another_version_is_read_with_what_it_has() -> None:
    traits = from_meta({"model": "alpha", "slo_s": "nan"})
    assert traits.key.model == "alpha"
    assert math.isinf(traits.slo_s)


async def test_running_requests_count_for_the_limit() -> None:
    """The limit is on the whole group: what runs of it may come back."""
    world = World(Policy(lease_ttl_s=LEASE_S, delta=1.0))
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", slo_s=36_000.0, count=140)
    await world.settle()
    await world.pull("a", "alpha", 130)
    await world.settle()
    await world.submit("alpha", slo_s=36_000.0, count=100)
    await world.settle()
    assert max(group.live for group in machine.board.groups.values()) < 170
    assert len(machine.board.groups) == 2


async def test_a_later_request_does_not_join_in_front_of_those_who_wait() -> None:
    """Two classes of prompts, one instance. While the first stays open in front of the second, it takes arrivals within a second of that
    or within a tenth of the wait of its first; later ones stand behind."""
    world = World(Policy(lease_ttl_s=LEASE_S, group_overtake_fraction=0.1, group_overtake_min_s=1.0))
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", slo_s=3_600.0, count=20)
    await world.advance(20.0)
    await world.submit("alpha", slo_s=3_600.0, prompt_tokens=2_000, count=5)
    await world.advance(1.5)  # of 21.5 s that the first waits
    await world.submit("alpha", slo_s=3_600.0)
    await world.settle()
    assert await sizes(world) == [21, 5]
    await world.advance(2.0)
    await world.submit("alpha", slo_s=3_600.0, count=3)
    await world.advance(5.0)
    await world.submit("alpha", slo_s=3_600.0, prompt_tokens=2_000, count=2)
    await world.settle()
    assert await sizes(world) == [21, 5, 3, 2], "nor does the second class come before what stands behind it now"
    queue = machine.board.queues["a"]
    assert [machine.board.groups[group_id].waiting for group_id in queue] == [21, 5, 3, 2], "in the order of arrival"


@pytest.mark.parametrize("fraction", [0.1, 1_000.0])
async def test_waits_are_predicted_for_the_group_that_a_request_joins(fraction: float) -> None:
    """By the planner's own settings: the bound on overtaking opens a group here, a loose one joins the first."""
    world = World(Policy(lease_ttl_s=LEASE_S, group_overtake_fraction=fraction, group_overtake_min_s=1.0))
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", slo_s=3_600.0, count=20)
    await world.advance(20.0)
    await world.submit("alpha", slo_s=3_600.0, prompt_tokens=2_000, count=5)
    await world.advance(5.0)
    first = machine.board.groups[machine.board.queues["a"][0]]
    predicted = machine._assignment.joins(machine.board, machine.estimates, first.traits.key, world.now_s + 3_600.0)
    assert predicted == (first.group_id if fraction > 1.0 else "")
    await world.submit("alpha", slo_s=3_600.0)
    await world.settle()
    assert await sizes(world) == ([21, 5] if predicted else [20, 5, 1])


async def test_a_group_with_nobody_alike_behind_it_stays_open() -> None:
    """Those behind it want another model, or have other SLOs: to join it overtakes nobody who is alike."""
    world = World(Policy(lease_ttl_s=LEASE_S, group_overtake_fraction=0.0, group_overtake_min_s=1.0))
    await world.join("a")
    await world.lead()
    await world.submit("alpha", slo_s=3_600.0)
    await world.submit("beta", slo_s=3_600.0)
    await world.submit("alpha", slo_s=30_000.0, prompt_tokens=2_000)
    for _ in range(5):
        await world.advance(10.0)
        await world.submit("alpha", slo_s=3_600.0)
    await world.settle()
    assert await sizes(world) == [6, 1, 1]


async def test_a_class_opens_a_group_a_second_at_the_most() -> None:
    """Two classes that come in turns, twenty a second."""
    world = World(Policy(lease_ttl_s=LEASE_S, group_overtake_fraction=0.1, group_overtake_min_s=1.0))
    await world.join("a")
    await world.lead()
    for number in range(100):
        await world.submit("alpha", slo_s=3_600.0, prompt_tokens=(200, 2_000)[number % 2])
        await world.advance(0.05)
    await world.settle()
    assert len(await sizes(world)) <= 2 * 5


async def test_a_group_closes_where_a_step_is_clearly_slower_than_elsewhere() -> None:
    world = World()
    await world.join("a")
    await world.join("b")
    machine = await world.lead()
    for slot in machine.board.slots.values():
        slot.active_model = "alpha"
    await world.submit("alpha", slo_s=36_000.0, count=200)
    await world.settle()
    waiting = {name: sum(each.waiting for each in machine.board.queue_groups(name)) for name in ("a", "b")}
    assert sum(waiting.values()) == 200
    assert min(waiting.values()) > 50, "one group of 200 would have room on one of them"
