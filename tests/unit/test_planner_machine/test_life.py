"""The life of requests, groups and instances under one planner, on the queue's memory twin."""

from __future__ import annotations

import itertools

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_planner.machine.effects import ApplyChunk, Expire, Place, ReadOverview, Reclaim
from qlm_planner.machine.events import InstanceAnnounced, LoadReported, ReplanRequested
from qlm_planner.policy import BATCH_MAX, Policy
from qlm_process.wire.instance import from_body
from qlm_queue.values import GroupPlacement, Owned, RequestPlacement

from .world import LEASE_S, World


async def test_requests_that_ended_before_they_were_placed_are_forgotten() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    keys = await world.submit("alpha", count=2)
    # They end while the planner's call is on its way.
    world.before_place = lambda: world.cancel(keys)
    await world.settle()
    assert [call for call in world.calls if isinstance(call, Place)]
    assert machine.board.open_groups == 0
    assert machine.board.groups == {}
    assert (await world.queue.overview()).groups == {}


async def test_a_drained_group_admits_nothing() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", count=3)
    await world.settle()
    [group_id] = await world.group_ids("a")
    await world.complete("a", await world.pull("a", "alpha", 3))
    await world.settle()
    await world.submit("alpha")
    await world.settle()
    [other] = await world.group_ids("a")
    assert other != group_id
    assert list(machine.board.groups) == [other]


async def test_a_request_that_meets_a_draining_group_is_served() -> None:
    """The planner does not know yet that the group drained: `place` opens it again."""
    world = World(Policy(lease_ttl_s=LEASE_S, overview_every_s=1000.0, overview_every_max_s=1000.0))
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", count=1)
    await world.settle()
    await world.pull("a", "alpha", 1)
    await world.settle()  # events have been read, so the next ones wait for `events_gap_s`
    await world.submit("alpha", count=1)
    await world.settle()
    [group_id] = await world.group_ids("a")
    [late] = await world.submit("alpha")
    pulled = await world.pull("a", "alpha", 5)
    assert len(pulled) == 1
    # Arrivals are read before these events: the machine joins the old group.
    await world.settle()
    assert await world.group_ids("a") == [group_id]
    assert await world.state(late) == "PLACED"
    assert machine.board.groups[group_id].waiting == 1
    assert machine.board.queues["a"] == [group_id]


async def test_unassigned_requests_wait_until_an_instance_joins() -> None:
    world = World()
    await world.join("a", models=["alpha"])
    machine = await world.lead()
    await world.submit("beta", count=5)
    await world.settle()
    assert (await world.queues()) == {"a": [], UNASSIGNED: ["beta"]}
    assert len(machine.board.queues[UNASSIGNED]) == 1
    incarnation = await world.join("b", models=["beta"])
    facts = from_body(next(record for record in (await world.queue.overview()).instances if record.name == "b").body, incarnation)
    await world.deliver(InstanceAnnounced(facts=facts))
    await world.advance(world.policy.overview_gap_s)
    assert (await world.queues()) == {"a": [], "b": ["beta"], UNASSIGNED: []}


async def test_a_model_without_a_profile_is_not_placed_on_its_instance() -> None:
    world = World()
    await world.join("a", gpu="unheard-of")
    await world.lead()
    await world.submit("alpha")
    await world.settle()
    assert (await world.queues()) == {"a": [], UNASSIGNED: ["alpha"]}


async def test_a_draining_instance_hands_its_groups_on_and_takes_them_back() -> None:
    world = World()
    await world.join("a")
    await world.lead()
    await world.submit("alpha", count=5)
    await world.submit("beta", count=5)
    await world.settle()
    await world.drain("a")
    await world.advance(1.0)
    assert (await world.queues())["a"] == []
    assert sorted((await world.queues())[UNASSIGNED]) == ["alpha", "beta"]
    await world.join("b")
    await world.advance(1.0)
    assert sorted((await world.queues())["b"]) == ["alpha", "beta"]
    assert (await world.queues())[UNASSIGNED] == []


async def test_a_lost_instance_gives_back_everything_in_bounded_calls() -> None:
    world = World()
    incarnation = await world.join("a")
    machine = await world.lead()
    keys = await world.submit("alpha", slo_s=3600.0, count=1300)
    await world.settle()
    await world.advance(LEASE_S + 1)
    taken = [len(await world.pull("a", "alpha", count)) for count in (500, 500, 200)]
    assert sum(taken) == 1200
    await world.join("b")
    await world.kill("a")
    await world.advance(2.0)
    reclaims = [call for call in world.calls if isinstance(call, Reclaim)]
    assert len(reclaims) == 4  # 500, 500, 200, and one that finds nothing
    assert {call.incarnation for call in reclaims} == {incarnation}
    overview = await world.queue.overview()
    assert incarnation not in overview.incarnations
    assert sum(group.waiting for group in overview.groups.values() if group.instance == "b") == 1300
    assert {await world.state(key) for key in keys} == {"PLACED"}
    assert machine.board.slots["a"].alive is False


async def test_an_instance_that_comes_back_keeps_its_queue() -> None:
    """The lease ended and a new incarnation registered before the planner looked: only what the old one ran is taken."""
    world = World()
    old = await world.join("a")
    await world.lead()
    await world.submit("alpha", count=10)
    await world.settle()
    await world.advance(LEASE_S + 1)
    await world.pull("a", "alpha", 4)
    await world.kill("a")
    new = await world.join("a")
    await world.advance(2.0)
    overview = await world.queue.overview()
    assert old not in overview.incarnations
    assert new != old
    assert sum(group.waiting for group in overview.groups.values() if group.instance == "a") == 10


async def test_nothing_is_reclaimed_within_a_lease_period_of_the_election() -> None:
    world = World()
    await world.join("a")
    await world.lead()
    await world.submit("alpha", count=10)
    await world.settle()
    await world.pull("a", "alpha", 4)
    await world.kill("a")
    await world.join("b")
    await world.lead()
    elected_s = world.now_s
    await world.advance(LEASE_S - 0.1)
    assert not [call for call in world.calls if isinstance(call, Reclaim)]
    assert (await world.queues())["a"] == ["alpha"], "its groups wait for it too"
    await world.advance(1.0)
    assert world.now_s > elected_s + LEASE_S
    assert [call for call in world.calls if isinstance(call, Reclaim)]
    assert (await world.queues())["a"] == []
    assert set((await world.queues())["b"]) == {"alpha"}


async def test_nothing_is_reclaimed_within_a_lease_period_of_a_reconnect() -> None:
    world = World()
    await world.join("a")
    await world.lead()
    await world.submit("alpha", count=10)
    await world.advance(LEASE_S + 1)
    await world.pull("a", "alpha", 4)
    world.faults = lambda call: "before"
    await world.advance(2.0)
    await world.kill("a")
    await world.advance(5.0)
    world.faults = lambda call: ""
    back_s = world.now_s
    while not any(isinstance(call, Reclaim) for call in world.calls):
        await world.advance(0.05)
        assert world.now_s < back_s + 2 * LEASE_S + world.policy.retry_max_s
    assert world.now_s >= back_s + LEASE_S


async def test_expired_requests_are_swept_every_second() -> None:
    world = World()
    await world.join("a")
    await world.lead()
    await world.submit("alpha", count=BATCH_MAX + 10, expire_after_s=5.0)
    await world.advance(4.5)
    sweeps = len([call for call in world.calls if isinstance(call, Expire)])
    assert sweeps == 5
    await world.advance(1.0)
    assert (await world.queue.overview()).live == 0
    assert len([call for call in world.calls if isinstance(call, Expire)]) == sweeps + 2, "a full call is followed by another at once"


async def test_a_request_costs_one_call_a_batch_and_no_overview() -> None:
    world = World()
    await world.join("a")
    await world.lead()
    world.calls.clear()
    await world.submit("alpha", slo_s=3600.0, count=2000)
    await world.settle()
    assert [len(call.requests) for call in world.calls if isinstance(call, Place)] == [500, 500, 500, 500]
    assert not [call for call in world.calls if isinstance(call, ReadOverview)]


async def test_a_replan_is_answered_also_when_nothing_changes() -> None:
    world = World()
    await world.join("a")
    await world.lead()
    await world.submit("alpha")
    await world.settle()
    await world.deliver(ReplanRequested(number=7))
    await world.advance(world.policy.overview_gap_s)
    assert [change.replans for change in world.changes if change.replans] == [{7: 0}]


async def test_a_change_of_the_plan_survives_a_conflict() -> None:
    """A group is opened on a queue between the overview and the chunk: the change is made again from what is there now."""
    world = World()
    await world.join("a", models=["alpha"])
    machine = await world.lead()
    await world.submit("beta", count=100)
    await world.settle()
    await world.join("b", models=["beta"])

    async def open_another() -> None:
        world.before_chunk = None
        [key] = await world.submit("beta")
        request = await world.queue.find(key)
        group = GroupPlacement(group_id="other", instance="b", before="", first_deadline_s=world.now_s, meta={"model": "beta"})
        assert world.lease is not None
        await world.queue.place(world.lease, [group], [RequestPlacement(queue_id=request.queue_id, key=key, group_id="other")])

    world.before_chunk = open_another
    await world.advance(1.0)
    assert machine.changes.conflicts == 1
    assert sorted(await world.group_ids("b")) == ["g1-1", "other"]
    assert (await world.queues())[UNASSIGNED] == []


async def test_conflicts_without_end_wait_for_the_next_overview() -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, overview_every_s=1.0, apply_attempts_max=3))
    await world.join("a", models=["alpha"])
    machine = await world.lead()
    await world.submit("beta", count=10)
    await world.settle()
    numbers = itertools.count()

    async def open_another() -> None:
        [key] = await world.submit("alpha")
        request = await world.queue.find(key)
        name = f"other-{next(numbers)}"
        group = GroupPlacement(group_id=name, instance="b", before="", first_deadline_s=world.now_s, meta={"model": "alpha"})
        assert world.lease is not None
        await world.queue.place(world.lease, [group], [RequestPlacement(queue_id=request.queue_id, key=key, group_id=name)])

    await world.join("b")
    world.before_chunk = open_another
    await world.advance(0.99)
    world.calls.clear()
    await world.advance(3.0)
    chunks = [call for call in world.calls if isinstance(call, ApplyChunk)]
    assert 3 <= len(chunks) <= 12, "three tries an overview period, and no more"
    world.before_chunk = None
    await world.advance(2.0)
    assert (await world.queues())[UNASSIGNED] == []
    assert machine.changes.conflicts >= 3


async def test_a_pull_that_is_read_after_a_report_does_not_change_the_active_model() -> None:
    """Events of the queue may arrive later than the report of a model swap that follows them."""
    world = World()
    incarnation = await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", 600.0, count=2)
    await world.settle()
    await world.deliver(LoadReported(incarnation=incarnation, active_model="beta"))
    await world.pull("a", "alpha", 2)
    await world.settle()
    assert machine.board.slots["a"].running == 2
    assert machine.board.slots["a"].active_model == "beta"


async def test_a_load_report_states_the_active_model_and_its_batch() -> None:
    world = World()
    incarnation = await world.join("a")
    machine = await world.lead()
    await world.deliver(LoadReported(incarnation=incarnation, active_model="beta", warm_models=("alpha",), batch=32))
    for _ in range(2):
        slot = machine.board.slots["a"]
        assert (slot.active_model, slot.batch("beta"), slot.batch("alpha")) == ("beta", 32, slot.facts.batch_max)
        await world.advance(1.0)  # an overview does not know it and keeps it
    await world.kill("a")
    await world.join("a")
    await world.advance(1.0)
    assert machine.board.slots["a"].batches == {}, "of the process before it"


async def test_a_gone_instance_is_forgotten_when_its_queue_is_empty() -> None:
    world = World(Policy(lease_ttl_s=LEASE_S, forget_after_s=10.0))
    await world.join("a")
    await world.join("b")
    machine = await world.lead()
    await world.submit("alpha", count=3)
    await world.advance(5.0)
    await world.kill("a")
    await world.advance(8.0)
    assert "a" in machine.board.slots
    await world.advance(4.0)
    assert set(machine.board.slots) == {"b"}
    assert {record.name for record in (await world.queue.overview()).instances} == {"b"}


async def test_a_requeued_group_of_a_lower_band_moves_back() -> None:
    """The queue opens it again at the head; the plan puts it back behind the bands before it."""
    world = World()
    await world.join("a")
    await world.lead()
    await world.submit("alpha", priority=5)
    await world.settle()
    pulled = await world.pull("a", "alpha", 1)
    await world.settle()
    await world.submit("beta", priority=1)
    await world.settle()
    owned = [Owned(queue_id=each.queue_id, key=each.key, attempt=each.attempt) for each in pulled]
    await world.queue.unpull(world.agents["a"][0], owned)
    assert (await world.queues())["a"] == ["alpha", "beta"]
    await world.advance(1.0)
    assert (await world.queues())["a"] == ["beta", "alpha"]


async def test_groups_of_a_lost_instance_do_not_wait_for_regular_looks() -> None:
    """A change of the plan gives few of them a home; the next one follows at once."""
    world = World(Policy(lease_ttl_s=LEASE_S, delta=1e-3, relocate_max=5))
    for name in ("a", "b"):
        await world.join(name)
    machine = await world.lead()
    await world.advance(2 * LEASE_S)
    for _ in range(60):
        await world.submit()
        await world.settle()
    assert len(machine.board.queues["a"]) == 30
    await world.kill("a")
    await world.advance(2 * machine.policy.overview_every_s)
    assert machine.board.queues["a"] == []
    assert len(machine.board.queues["b"]) == 60
