"""Groups that are split while they wait."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestKey
from qlm_planner.board.group import Group
from qlm_planner.machine.effects import Call, Regroup
from qlm_planner.machine.step import PlannerMachine
from qlm_planner.overload.advice_question import question_of
from qlm_planner.plan.relocation import homeless
from qlm_planner.policy import Order, Policy
from qlm_process.wire.instance import to_body
from qlm_queue.values import Owned, Pulled, RequeueCause

from .world import LEASE_S, World

HOUR_S = 36_000.0


def limit_of(machine: PlannerMachine, group: Group) -> int:
    mean_tokens = group.waiting_prompt_tokens / group.waiting
    return machine.estimates.limits(machine.board.slots[group.instance], group.traits.key, group.traits.slo_s, mean_tokens).waiting


def owned(pulled: Pulled) -> Owned:
    return Owned(queue_id=pulled.queue_id, key=pulled.key, attempt=pulled.attempt)


def regroups(world: World) -> list[Regroup]:
    return [call for call in world.calls if isinstance(call, Regroup)]


async def order_of_service(world: World, instance: str) -> list[RequestKey]:
    """The waiting requests of a virtual queue."""
    pages = [await world.queue.waiting(group_id, 0, 500) for group_id in await world.group_ids(instance)]
    return [request.key for page in pages for request in page]


async def agree(world: World) -> None:
    """The machine knows the state of the queue."""
    machine = world.machine
    assert machine is not None
    overview = await world.queue.overview()
    for name, queue in machine.board.queues.items():
        assert queue == await world.group_ids(name)
    for group_id, record in overview.groups.items():
        group = machine.board.groups[group_id]
        assert (group.waiting, group.live, group.waiting_prompt_tokens) == (record.waiting, record.live, record.waiting_prompt_tokens)
        assert (group.first_deadline_s, group.last_deadline_s) == pytest.approx((record.first_deadline_s, record.last_deadline_s))


async def small_batch(world: World, name: str, batch: int) -> None:
    """An instance says that its engine runs so many at once."""
    assert world.machine is not None
    await world.advance(1.0)
    facts = replace(world.machine.board.slots[name].facts, batch_max=batch)
    await world.queue.describe(world.agents[name][1], to_body(facts))
    await world.advance(1.0)


async def test_a_group_that_moved_to_a_smaller_batch_is_split() -> None:
    """The instance with the large batch leaves; the other one has a limit of its own."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    keys = await world.submit("alpha", HOUR_S, count=300)
    await world.settle()
    assert len(machine.board.groups) == 1, "within the limit of the large one"
    await world.join("b")
    await small_batch(world, "b", 20)
    await world.drain("a")
    await world.advance(10.0)
    groups = machine.board.queue_groups("b")
    assert sum(group.waiting for group in groups) == 300
    assert all(group.waiting <= limit_of(machine, group) for group in groups[:-1])
    assert groups[-1].waiting <= 1.25 * limit_of(machine, groups[-1])
    assert all(before.first_deadline_s <= after.first_deadline_s for before, after in itertools.pairwise(groups))
    assert await order_of_service(world, "b") == keys, "nobody is lost, doubled or out of order"
    assert regroups(world)
    await agree(world)


async def test_the_part_split_off_stands_behind_its_group_at_once() -> None:
    """The board states it before the next look at the queue does."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    for slo_s in (HOUR_S, 2 * HOUR_S, 8 * HOUR_S):
        await world.submit("alpha", slo_s, count=10)
        await world.settle()
    first, source, last = machine.board.queue_groups("a")
    tokens = source.waiting_prompt_tokens
    into = replace(source, group_id="split", waiting=0, live=0, waiting_prompt_tokens=0)
    machine.board.regroup(source, into, 4, 40)
    assert machine.board.queue_groups("a") == [first, source, into, last]
    assert [(group.waiting, group.live) for group in (source, into)] == [(6, 6), (4, 4)]
    assert [group.waiting_prompt_tokens for group in (source, into)] == [tokens - 40, 40]


async def test_a_group_that_grew_by_returned_requests_is_split() -> None:
    """Others took the room of the running ones, which then return."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    keys = await world.submit("alpha", 20.0, count=150)
    await world.settle()
    [group] = machine.board.groups.values()
    limit = limit_of(machine, group)
    pulled = await world.pull("a", "alpha", 140)
    await world.settle()
    keys += await world.submit("alpha", 20.0, count=limit - 20)
    await world.settle()
    assert list(machine.board.groups) == [group.group_id]
    await world.advance(1.0)
    assert not regroups(world)
    await world.queue.requeue(world.agents["a"][0], [owned(each) for each in pulled], RequeueCause.DRAINED, b"")
    assert (await world.queue.overview()).groups[group.group_id].waiting > 1.25 * limit
    await world.advance(3.0)
    groups = machine.board.queue_groups("a")
    assert len(groups) == 2
    assert groups[0].group_id == group.group_id
    assert all(each.waiting <= 1.25 * limit_of(machine, each) for each in groups)
    assert await order_of_service(world, "a") == keys
    await agree(world)


async def test_requests_pulled_during_a_split_stay_with_their_agent() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    keys = await world.submit("alpha", HOUR_S, count=300)
    await world.settle()
    pulled: list[Pulled] = []

    async def pull_first() -> None:
        pulled.extend(await world.pull("a", "alpha", 250))

    world.before_regroup = pull_first
    await small_batch(world, "a", 20)
    await world.advance(10.0)
    assert regroups(world)
    running = {each.key for each in pulled}
    assert await order_of_service(world, "a") == [key for key in keys if key not in running]
    assert machine.board.slots["a"].running == len(running)
    await agree(world)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_call_without_an_answer_loses_nothing(when: str) -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    keys = await world.submit("alpha", HOUR_S, count=300)
    await world.settle()
    failed: list[Regroup] = []

    def fault(call: Call) -> str:
        if isinstance(call, Regroup) and len(failed) < 2:
            failed.append(call)
            return when
        return ""

    world.faults = fault
    await small_batch(world, "a", 20)
    await world.advance(10.0)
    assert len(failed) == 2
    assert await order_of_service(world, "a") == keys
    assert all(each.waiting <= 1.25 * limit_of(machine, each) for each in machine.board.queue_groups("a"))
    await agree(world)


async def test_an_adversary_makes_no_endless_moves() -> None:
    """The batch goes up and down for ever: parts are within the limit, so only the first times cost anything."""
    world = World()
    await world.join("a")
    await world.lead()
    keys = await world.submit("alpha", HOUR_S, count=300)
    await world.settle()
    counts = []
    for batch in [20, 133] * 3:
        await small_batch(world, "a", batch)
        await world.advance(5.0)
        counts.append(len(regroups(world)))
    assert counts[0] == counts[-1] > 0, "all in the first round"
    assert await order_of_service(world, "a") == keys
    moved = sum(call.count for call in regroups(world))
    assert moved <= 2 * len(keys)


async def test_calls_are_seldom() -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, regroup_every_s=2.0, regroup_max=50))
    await world.join("a")
    await world.lead()
    await world.submit("alpha", HOUR_S, count=300)
    await world.settle()
    await small_batch(world, "a", 10)
    await world.advance(10.0)
    assert 4 <= len(regroups(world)) <= 7
    assert all(call.count <= 50 for call in regroups(world))


# Models and tenants that are paused: their groups leave the instances' queues, wait on "unassigned", and come back


LATER_S = 5.0


@pytest.mark.parametrize("order", [Order.SLO, Order.FCFS, Order.EDF])
async def test_groups_of_a_paused_model_wait_unassigned_and_come_back(order: Order) -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, order=order))
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", count=3)
    await world.submit("beta", count=2)
    await world.advance(1.0)
    await world.queue.pause(PauseKind.MODEL, "alpha")
    await world.advance(LATER_S)
    assert await waiting_on(world, "a") == {"beta": 2}
    assert await waiting_on(world, UNASSIGNED) == {"alpha": 3}

    await world.submit("alpha", slo_s=900.0, count=8)
    await world.settle()
    assert await waiting_on(world, UNASSIGNED) == {"alpha": 11}, "it goes there at once"
    await world.advance(LATER_S)
    assert await waiting_on(world, "a") == {"beta": 2}
    assert homeless(machine.board, machine.estimates, lost_too=True) == [], "it stays there"

    await world.queue.resume(PauseKind.MODEL, "alpha")
    await world.advance(LATER_S)
    assert await waiting_on(world, "a") == {"alpha": 11, "beta": 2}
    assert await waiting_on(world, UNASSIGNED) == {}


@pytest.mark.parametrize("order", [Order.SLO, Order.FCFS])
async def test_requests_of_a_paused_tenant_leave_the_groups_that_they_share(order: Order) -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, order=order))
    await world.join("a")
    machine = await world.lead()
    for tenant in ("t", "u", "t", "u"):
        await world.submit("alpha", tenant=tenant)
    await world.advance(1.0)
    await world.queue.pause(PauseKind.TENANT, "t")
    pulled = await world.pull("a", "alpha", 10)
    assert [each.key.tenant for each in pulled] == ["u", "u"]
    await world.settle()
    assert machine.board.open_groups == 0, "the planner hears of it"
    await world.advance(LATER_S)
    await world.submit("alpha", tenant="t")
    await world.advance(1.0)
    assert await waiting_on(world, UNASSIGNED) == {"alpha": 3}
    assert await waiting_on(world, "a") == {}
    assert (await world.queue.overview()).unplaced == 0

    await world.queue.resume(PauseKind.TENANT, "t")
    await world.advance(LATER_S)
    assert await waiting_on(world, "a") == {"alpha": 3}
    assert len(await world.pull("a", "alpha", 10)) == 3


async def test_a_new_leader_knows_what_is_paused() -> None:
    world = World()
    await world.join("a")
    await world.queue.pause(PauseKind.MODEL, "alpha")
    await world.submit("alpha")
    for _ in range(2):
        await world.lead()
        await world.advance(LATER_S)
        assert await waiting_on(world, UNASSIGNED) == {"alpha": 1}


async def test_nobody_is_advised_to_add_instances_for_what_is_paused() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.queue.pause(PauseKind.MODEL, "alpha")
    await world.submit("alpha", slo_s=1.0, count=200)
    await world.submit("beta")
    await world.advance(LATER_S)
    question = question_of(machine.board, machine.changes.table, machine.demand, world.now_s)
    assert question.models == ("beta",)
    assert sum(miss.waiting for miss in question.waiting) == 1
    assert question.unserved == 0


async def waiting_on(world: World, instance: str) -> dict[str, int]:
    """Requests that wait on a virtual queue, by model."""
    overview = await world.queue.overview()
    found: dict[str, int] = {}
    for group_id in await world.group_ids(instance):
        group = overview.groups[group_id]
        found[group.meta["model"]] = found.get(group.meta["model"], 0) + group.waiting
    return found
