"""Requests whose SLO bounds their first token, and that return with it: nothing of theirs can be late any more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from qlm_core.vocabulary.overload import Overload
from qlm_core.vocabulary.request import RequestState, SloKind
from qlm_planner.board.group import Group
from qlm_planner.overload.advice import advise
from qlm_planner.policy import Policy
from qlm_process.wire.instance import to_body
from qlm_queue.values import Emission, Owned, Pulled, RequeueCause

from .test_advice import build_question
from .world import LEASE_S, START_S, World

SLO_S = 5.0


async def requeued_batch(
    policy: Policy, cause: RequeueCause = RequeueCause.EVICTED, *, behind: int = 0, answered: int = 20
) -> tuple[World, list[Pulled]]:
    """Twenty that ran for three seconds, and are back behind others of another model. `behind`: more of their group that have not run.
    `answered`: how many of them made a token."""
    world = World(policy)
    incarnation = await world.join("a")
    await world.lead()
    await world.advance(2 * LEASE_S)
    await world.submit("alpha", SLO_S, count=20 + behind, kind=SloKind.FIRST_TOKEN)
    await world.settle()
    pulled = await world.pull("a", "alpha", 20)
    await world.advance(1.0)
    await world.submit("beta", 30.0, count=30)
    await world.advance(2.0)
    owned = [Owned(queue_id=each.queue_id, key=each.key, attempt=each.attempt) for each in pulled]
    await world.queue.emit(incarnation, [first_token(each) for each in pulled[:answered]])
    await world.queue.requeue(incarnation, owned, cause, b"")
    await world.settle()
    return world, pulled


def first_token(pulled: Pulled) -> Emission:
    return Emission(queue_id=pulled.queue_id, key=pulled.key, attempt=pulled.attempt, offset=0, progress=bytes(4), frame=b"")


def alpha(world: World) -> Group:
    assert world.machine is not None
    [found] = [group for group in world.machine.board.groups.values() if group.traits.key.model == "alpha"]
    return found


@pytest.mark.parametrize("cause", RequeueCause)
@pytest.mark.parametrize("answered", [0, 20])
async def test_answered_requests_are_not_late(cause: RequeueCause, answered: int) -> None:
    """An evicted request has a token already: others are unpulled."""
    late = 0.0 if answered or cause is RequeueCause.EVICTED else 20.0
    world, _ = await requeued_batch(Policy(lease_ttl_s=LEASE_S), cause, answered=answered)
    await world.advance(4.0)
    assert world.machine is not None
    assert world.machine.changes.predicted.late == pytest.approx(late, abs=0.1)


async def test_a_request_that_joins_them_has_a_deadline() -> None:
    world, _ = await requeued_batch(Policy(lease_ttl_s=LEASE_S))
    group = alpha(world)
    assert (group.waiting, group.answered, group.next_deadline_s) == (20, 20, math.inf)
    await world.advance(1.0)
    assert group.next_deadline_s == math.inf, "a look changes nothing about that"
    due_s = group.first_deadline_s + 0.4 * SLO_S
    group.waiting, group.last_deadline_s = 25, due_s
    group.set_next_deadline(group.first_deadline_s)
    assert group.first_deadline_s < group.next_deadline_s < due_s
    assert group.answered == 20


async def test_they_run_again_and_end() -> None:
    world, _ = await requeued_batch(Policy(lease_ttl_s=LEASE_S))
    await world.complete("a", await world.pull("a", "beta", 30))
    first = await world.pull("a", "alpha", 15)
    await world.settle()
    assert (alpha(world).waiting, alpha(world).answered) == (5, 5)
    await world.complete("a", [*first, *await world.pull("a", "alpha", 5)])
    await world.advance(1.0)
    assert world.machine is not None
    assert not world.machine.board.groups


async def test_those_that_are_split_off_are_answered_in_their_new_group() -> None:
    """Their instance runs fewer at once now."""
    world, _ = await requeued_batch(Policy(lease_ttl_s=LEASE_S), behind=2)
    assert world.machine is not None
    facts = replace(world.machine.board.slots["a"].facts, batch_max=2)
    await world.queue.describe(world.agents["a"][1], to_body(facts))
    await world.advance(2.0)
    parts = [group for group in world.machine.board.groups.values() if group.traits.key.model == "alpha"]
    assert [(each.waiting, each.answered) for each in parts] == [(8, 8), (8, 8), (6, 4)]
    assert [each.next_deadline_s < math.inf for each in parts] == [False, False, True]


async def test_they_are_none_of_the_misses_that_advice_names() -> None:
    world, _ = await requeued_batch(Policy(lease_ttl_s=LEASE_S), behind=10)
    await world.advance(4.0)
    assert (alpha(world).waiting, alpha(world).answered) == (30, 20)
    advice = advise(await build_question(world, {}))
    [miss] = advice.misses
    assert miss.late == pytest.approx(10.0, abs=0.5)
    assert advice.late == pytest.approx(10.0, abs=0.5)


async def test_those_that_are_unpulled_are_answered_still_and_those_that_are_cancelled_leave_as_such() -> None:
    world, pulled = await requeued_batch(Policy(lease_ttl_s=LEASE_S), behind=2)
    await world.complete("a", await world.pull("a", "beta", 30))
    again = await world.pull("a", "alpha", 5)
    await world.settle()
    assert (alpha(world).waiting, alpha(world).answered) == (17, 15)
    owned = [Owned(queue_id=each.queue_id, key=each.key, attempt=each.attempt) for each in again]
    await world.queue.unpull(world.agents["a"][0], owned)
    await world.settle()
    assert (alpha(world).waiting, alpha(world).answered) == (22, 20)
    await world.cancel([each.key for each in pulled])
    await world.settle()
    assert (alpha(world).waiting, alpha(world).answered) == (2, 0)
    assert alpha(world).next_deadline_s < math.inf


@pytest.mark.parametrize("cause", [RequeueCause.EVICTED, RequeueCause.DRAINED, RequeueCause.LOST])
async def test_they_are_not_shed(cause: RequeueCause) -> None:
    world, pulled = await requeued_batch(Policy(lease_ttl_s=LEASE_S, overload=Overload.SHED), cause)
    await world.advance(6.0)
    found = [await world.queue.find(each.key) for each in pulled]
    assert {each.state for each in found if each is not None} == {RequestState.PLACED}
    assert world.now_s > START_S + 2 * LEASE_S + SLO_S


async def test_only_those_of_their_group_are_shed_that_wait_for_a_first_token() -> None:
    world, pulled = await requeued_batch(Policy(lease_ttl_s=LEASE_S, overload=Overload.SHED), behind=10)
    assert (alpha(world).waiting, alpha(world).answered) == (30, 20)
    await world.advance(6.0)
    found = [await world.queue.find(each.key) for each in pulled]
    assert {each.state for each in found if each is not None} == {RequestState.PLACED}
    assert alpha(world).waiting < 30
