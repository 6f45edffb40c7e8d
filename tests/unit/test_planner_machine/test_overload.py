"""Fallbacks when no order meets the SLOs (`planner.overload`, QLM A.3)."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from qlm_core.vocabulary.errors import NotFound
from qlm_core.vocabulary.overload import Overload
from qlm_core.vocabulary.request import RequestFacts, RequestKey, RequestState, Slo, SloKind
from qlm_planner.board.board import Board
from qlm_planner.cost.order_cost import OWN, WORK
from qlm_planner.cost.virtual_queues import lines_of, times_of
from qlm_planner.machine.effects import Shed
from qlm_planner.overload.shedding import ROUNDS_MIN, Shedding
from qlm_planner.policy import Policy

from .test_cheapest_place import board_of, class_table, group, slot
from .test_service_times import add_group, add_slot
from .world import LEASE_S, START_S, World


async def overloaded(overload: Overload, **settings: float) -> World:
    world = World(Policy(lease_ttl_s=LEASE_S, overload=overload, **settings))  # type: ignore[arg-type]
    await world.join("a")
    await world.lead()
    return world


async def states(world: World, keys: list[RequestKey]) -> Counter[RequestState]:
    found = Counter[RequestState]()
    for key in keys:
        try:
            found[(await world.queue.find(key)).state] += 1
        except NotFound:
            found[RequestState.EXPIRED] += 1
    return found


async def test_shedding_fails_late_requests_and_saves_the_rest() -> None:
    world = await overloaded(Overload.SHED)
    keys = await world.submit("alpha", slo_s=20.0, count=1500)
    await world.advance(15.0)
    machine = world.machine
    assert machine is not None
    found = await states(world, keys)
    assert found[RequestState.FAILED] >= 300
    assert found[RequestState.FAILED] + found[RequestState.PLACED] == 1500
    ended = [await world.queue.find(key) for key in keys if (await world.queue.find(key)).state is RequestState.FAILED]
    assert b"SHED" in ended[0].result  # type: ignore[union-attr]


async def test_shedding_is_bounded_in_a_second_and_waits_for_several_looks() -> None:
    world = await overloaded(Overload.SHED, shed_max=20)
    await world.submit("alpha", slo_s=20.0, count=1500)
    await world.settle()
    assert not [call for call in world.calls if isinstance(call, Shed)], "a better order comes first"
    await world.advance(10.0)
    sheds = [call for call in world.calls if isinstance(call, Shed)]
    assert 1 <= len(sheds) <= 11
    assert all(call.count <= 20 for call in sheds)


async def test_nothing_is_shed_that_is_in_time_or_has_no_deadline() -> None:
    world = await overloaded(Overload.SHED)
    await world.submit("alpha", slo_s=600.0, count=300)
    await world.submit("beta", priority=5, count=1500)
    await world.advance(5.0)
    assert not [call for call in world.calls if isinstance(call, Shed)]


def test_all_of_a_group_are_late_where_one_alone_takes_longer_than_its_slo() -> None:
    made, board = class_table(), Board(slo_band=0)
    add_slot(board, 0, "alpha", running=0, warm="alpha")
    facts = RequestFacts(
        queue_id="0-0",
        key=RequestKey("t", "0"),
        acceptance_number=0,
        accepted_s=START_S,
        model="alpha",
        slo=Slo(kind=SloKind.COMPLETION, seconds=60.0),
        prompt_tokens=40,
        output_tokens_max=256,
    )
    group = add_group(board, 0, facts, "i-0", 40, 40 * 40)
    [line] = lines_of(board, made, START_S)
    own_s = float(line.rows[OWN, 0])
    for share, shed in ((0.5, 39), (20.0, 0)):  # one may just be in time
        shedding = Shedding(policy=Policy(shed_max=100))
        group.first_deadline_s = group.next_deadline_s = group.last_deadline_s = START_S + share * own_s
        for _ in range(ROUNDS_MIN):
            shedding.find_late(board, made, START_S)
        assert (0 if shedding.due is None else shedding.due.count) == shed


async def test_the_lowest_value_goes_first() -> None:
    """Two kinds are late alike; the one with long prompts takes more engine time for the same weight."""
    world = await overloaded(Overload.SHED)
    await world.submit("alpha", slo_s=15.0, count=800)
    await world.submit("alpha", slo_s=15.0, count=800, prompt_tokens=2000)
    await world.advance(4.0)
    machine = world.machine
    assert machine is not None
    first = next(call for call in world.calls if isinstance(call, Shed))
    group = machine.board.groups.get(first.group_id)
    assert group is None or group.traits.key.token_class == "4096"


@pytest.mark.parametrize("overload", [Overload.BEST_EFFORT, Overload.REFUSE])
async def test_nothing_is_shed_under_other_fallbacks(overload: Overload) -> None:
    world = await overloaded(overload)
    await world.submit("alpha", slo_s=5.0, count=700)
    await world.advance(4.0)
    assert not [call for call in world.calls if isinstance(call, Shed)]


async def test_edf_orders_by_deadline_while_misses_are_expected_and_no_longer() -> None:
    """Not before better orders were tried, and not for long after, however long it was bad."""
    world = await overloaded(Overload.EDF)
    keys: list[RequestKey] = []
    for number in range(20):
        keys += await world.submit(("alpha", "beta")[number % 2], slo_s=6.0 + number, count=60)
        await world.settle()
    await world.advance(1.0)
    machine = world.machine
    assert machine is not None
    assert machine.changes.predicted.late > 100
    assert machine.changes.deciding is None
    await world.advance(5.0)
    assert machine.changes.deciding is machine.changes.fallback
    assert by_deadline(machine.board)
    chance = random.Random(1)
    for _ in range(30):
        keys += await world.submit(chance.choice(("alpha", "beta", "gamma")), slo_s=chance.uniform(2.0, 40.0), count=chance.choice((1, 5)))
        await world.settle()
        assert by_deadline(machine.board), "those that come go by it too"
    await world.advance(30.0)
    for key in keys:
        await world.queue.cancel(key, b"")
    await world.advance(5.0)
    assert machine.changes.deciding is None


def by_deadline(board: Board) -> bool:
    """Behind the head."""
    deadlines = [board.groups[group_id].first_deadline_s for group_id in board.queues["a"]][1:]
    return deadlines == sorted(deadlines)


# On boards made by hand -----------------------------------------------------------------------------------------------


def looked(board: Board, rounds: int = ROUNDS_MIN) -> Shed | None:
    """Requests shed after some rounds at one moment."""
    shedding, made = Shedding(policy=Policy()), class_table()
    for _ in range(rounds):
        shedding.find_late(board, made, START_S)
    return shedding.due


def test_it_takes_several_looks_in_a_row() -> None:
    late, early = board_of([slot("a")], {"a": [group(1, "alpha", 2.0, 400)]}), board_of([slot("a")], {"a": [group(1, "alpha", 200.0, 400)]})
    assert looked(late, ROUNDS_MIN - 1) is None
    assert looked(late, ROUNDS_MIN) is not None
    shedding, made = Shedding(policy=Policy()), class_table()
    for board in (late, late, early, late, late):
        shedding.find_late(board, made, START_S)
        assert shedding.due is None
    shedding.find_late(late, made, START_S)
    assert shedding.due is not None


def test_as_many_are_shed_as_are_late_by_a_draw() -> None:
    """Behind 300 others 40 requests are due at about the time when the middle of them ends."""
    board = board_of([slot("a")], {"a": [group(1, "alpha", 500.0, 300), group(2, "alpha", 10.0, 40)]})
    made = class_table()
    [line] = lines_of(board, made, START_S)
    times = times_of([line], made)
    chance = np.random.default_rng(1)
    ends_s = times.start_s[1] + line.rows[OWN, 1] + chance.uniform(0.0, line.rows[WORK, 1], 100_000)
    ends_s += chance.normal(0.0, math.sqrt(times.end_variance[1]), 100_000)
    expected = 40 * float((ends_s > 10.0).mean())
    assert 5.0 < expected < 35.0
    due = looked(board)
    assert due is not None
    assert due.count == pytest.approx(expected, abs=1.0)
    assert (due.group_id, due.keep) == ("alpha-2", 40 - due.count)


@pytest.mark.parametrize(("due_s", "spread_s", "oldest"), [(0.5, 0.0, True), (5.0, 0.0, False), (5.0, 3.0, False), (5.0, 20.0, True)])
def test_requests_late_even_alone_go_first_else_the_newest(due_s: float, spread_s: float, oldest: bool) -> None:
    """One request by itself takes a second, in a full batch three, and the group nine. Where each has more time than those before it, by
    more than they take, the first are the late ones."""
    late, before = group(1, "alpha", due_s, 400), group(2, "alpha", 3600.0, 300)
    late.last_deadline_s += spread_s
    due = looked(board_of([slot("a")], {"a": [before, late]}))
    assert due is not None
    assert due.oldest is oldest


def test_requests_that_are_due_as_they_end_are_not_late() -> None:
    """Each has its own deadline: a group whose last ones end after the first deadline loses nobody."""
    each = group(1, "alpha", 5.0, 400)
    assert looked(board_of([slot("a")], {"a": [each]})) is not None
    each.last_deadline_s += 9.0
    assert looked(board_of([slot("a")], {"a": [each]})) is None


def test_value_is_weight_for_engine_time() -> None:
    """For one request, however many there are: long prompts take five times as long, and a tenant may count for more than that."""
    few_long, many_short = group(1, "alpha", 1.0, 20), group(2, "alpha", 1.0, 400)
    few_long.waiting_prompt_tokens = 2000 * 20
    due = looked(board_of([slot("a")], {"a": [few_long, many_short]}))
    assert due is not None
    assert due.group_id == few_long.group_id
    few_long.traits = replace(few_long.traits, key=replace(few_long.traits.key, tenant_class="16"))
    due = looked(board_of([slot("a")], {"a": [few_long, many_short]}))
    assert due is not None
    assert due.group_id == many_short.group_id


def test_one_call_at_a_time() -> None:
    shedding, due = Shedding(policy=Policy()), Shed(group_id="g1-1", keep=0, count=5, oldest=False)
    shedding.due = due
    assert shedding.call(START_S) is due
    assert shedding.call(START_S) is None, "once"
    shedding.due = due
    assert shedding.call(START_S + 100.0) is None
    shedding.answered()
    assert shedding.call(START_S + 100.0) is due


async def test_a_shed_call_that_failed_is_made_again_after_a_look() -> None:
    world = await overloaded(Overload.SHED)
    failed: list[Shed] = []

    def faults(call: object) -> str:
        if isinstance(call, Shed) and not failed:
            failed.append(call)
            return "before"
        return ""

    world.faults = faults
    await world.submit("alpha", slo_s=10.0, count=1000)
    await world.advance(6.0)
    assert failed
    assert len([call for call in world.calls if isinstance(call, Shed)]) > 1
