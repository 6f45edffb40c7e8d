"""read_arrivals, read_unplaced, place, apply_plan, reclaim, and the reads of a planner."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from qlm_core.vocabulary.errors import LeaseLost, NotFound
from qlm_core.vocabulary.request import RequestState
from qlm_queue.values import BATCH_MAX, PLANNER_ROLE, ControlKind, PlanChunk, RequeueCause, StepStatus

from .mirror import live
from .scenario import CANCELLED, FAILURE, TTL_S, Scenario, completion, key_of, owned, placement, segment


async def test_arrivals_are_given_once_and_stay_unplaced_until_placed(scene: Scenario) -> None:
    mirror = scene.mirror
    assert await mirror("read_arrivals", 0, 10) == []
    await scene.accept("r1", "r2", "r3")
    assert [request.key.request_id for request in await mirror("read_arrivals", 0, 2)] == ["r1", "r2"]
    assert [request.key.request_id for request in await mirror("read_arrivals", 0, 2)] == ["r3"]
    assert await mirror("read_arrivals", 0, 2) == []
    unplaced = await mirror("read_unplaced", "", 10)
    assert [request.key.request_id for request in unplaced] == ["r1", "r2", "r3"]
    assert all(request.state is RequestState.ACCEPTED and request.body for request in unplaced)
    await scene.place("g", "r2")
    assert [request.key.request_id for request in await mirror("read_unplaced", "", 10)] == ["r1", "r3"]
    await mirror("cancel", key_of("r1"), CANCELLED)
    assert [request.key.request_id for request in await mirror("read_unplaced", "", 10)] == ["r3"]


async def test_unplaced_requests_are_paged_whether_a_planner_read_them_or_not(scene: Scenario) -> None:
    mirror = scene.mirror
    names = [f"r{i}" for i in range(7)]
    await scene.accept(*names)
    await mirror("read_arrivals", 0, 3)
    for size in (1, 2, 3, 4, 10):
        found: list[str] = []
        after = ""
        while page := await mirror("read_unplaced", after, size):
            found += (request.key.request_id for request in page)
            after = page[-1].queue_id
        assert found == names


async def test_requests_placed_or_ended_unread_do_not_arrive(scene: Scenario) -> None:
    """A planner that rebuilds from `read_unplaced` places requests that no planner has read as arrivals."""
    mirror = scene.mirror
    await scene.accept("r1", "r2", "r3", "r4")
    await scene.place("g", "r1", "r3")
    await mirror("cancel", key_of("r2"), CANCELLED)
    assert [request.key.request_id for request in await mirror("read_unplaced", "", 10)] == ["r4"]
    assert [request.key.request_id for request in await mirror("read_unplaced", "", 1)] == ["r4"]
    assert [request.key.request_id for request in await mirror("read_arrivals", 0, 10)] == ["r4"]
    assert await mirror("read_arrivals", 0, 10) == []
    pulled = await scene.pull()
    await mirror("complete", scene.incarnation, [completion(pulled[name]) for name in ("r1", "r3")])
    await mirror("cancel", key_of("r4"), CANCELLED)
    assert await mirror.real.leftovers() == []


async def test_a_page_of_unplaced_requests_is_not_cut_short_by_placed_ones(scene: Scenario) -> None:
    mirror = scene.mirror
    names = [f"r{i}" for i in range(12)]
    await scene.accept(*names)
    await scene.place("g", *names[:10])
    assert [request.key.request_id for request in await mirror("read_unplaced", "", 1)] == ["r10"]
    await mirror("read_arrivals", 0, 1)
    assert [request.key.request_id for request in await mirror("read_unplaced", "", 3)] == ["r10", "r11"]


async def test_place_opens_a_group_and_wakes_its_agent(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.accept("r1", "r2")
    assert await scene.place("g", "r1", first_deadline_s=123.25) == [StepStatus.DONE]
    assert await scene.place("g", "r2", first_deadline_s=99.5) == [StepStatus.DONE]
    group = (await mirror("overview")).groups["g"]
    assert (group.instance, group.waiting, group.live, group.waiting_prompt_tokens) == ("a", 2, 2, 20)
    assert (group.first_deadline_s, group.meta) == (99.5, {"model": "m", "slo_class": "32s"})
    assert [entry.kind for entry in await mirror("read_control", "a", "0", 0)] == [ControlKind.WAKE]
    found = live(await mirror("find", key_of("r2")))
    assert (found.state, found.group_id) == (RequestState.PLACED, "g")


async def test_a_group_keeps_the_last_deadline_that_it_received(scene: Scenario) -> None:
    """Also one that drained and is opened again: of those that run some may return. It is never before the first."""
    mirror = scene.mirror
    await scene.accept("r1", "r2", "r3", "r4")
    for name, first_s, last_s, kept in (("r1", 100.0, -math.inf, 100.0), ("r2", 90.0, 130.0, 130.0), ("r3", 80.0, 120.0, 130.0)):
        assert await scene.place("g", name, first_deadline_s=first_s, last_deadline_s=last_s) == [StepStatus.DONE]
        group = (await mirror("overview")).groups["g"]
        assert (group.first_deadline_s, group.last_deadline_s) == (first_s, kept)
    assert len(await scene.pull()) == 3
    assert await scene.place("g", "r4", first_deadline_s=95.0, last_deadline_s=110.0) == [StepStatus.DONE]
    group = (await mirror("overview")).groups["g"]
    assert (group.first_deadline_s, group.last_deadline_s) == (95.0, 130.0)


async def test_groups_without_a_deadline(scene: Scenario) -> None:
    await scene.accept("r1", "r2")
    await scene.place("g", "r1", first_deadline_s=math.inf)
    await scene.place("g", "r2", first_deadline_s=math.inf)
    group = (await scene.mirror("overview")).groups["g"]
    assert (group.first_deadline_s, group.last_deadline_s) == (math.inf, math.inf)


async def test_a_group_is_opened_where_the_planner_wants_it(scene: Scenario) -> None:
    await scene.queue_up("g1", "r1")
    await scene.queue_up("g2", "r2")
    await scene.queue_up("g3", "r3", before="g2")
    await scene.queue_up("g4", "r4", before="nowhere")
    await scene.queue_up("g5", "r5", before="g1")
    assert await scene.queue_of() == ["g5", "g1", "g3", "g2", "g4"]


async def test_one_call_places_into_several_groups(scene: Scenario) -> None:
    await scene.accept("r1", "r2", "r3")
    groups = [placement("g2"), placement("g1", before="g2"), placement("empty")]
    wanted = [scene.wanted("r1", "g2"), scene.wanted("r2", "g1"), scene.wanted("r3", "g2")]
    assert await scene.mirror("place", scene.planner, groups, wanted) == [StepStatus.DONE] * 3
    assert await scene.queue_of() == ["g1", "g2"]


async def test_placing_again_is_done_and_elsewhere_is_stale(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", "r2")
    assert await scene.place("g", "r1", first_deadline_s=1.0) == [StepStatus.DONE]
    assert await scene.place("other", "r1") == [StepStatus.STALE]
    assert "other" not in (await scene.mirror("overview")).groups
    pulled = await scene.pull(count=1)
    assert await scene.place("g", "r1") == [StepStatus.STALE]  # it runs
    await scene.mirror("complete", scene.incarnation, [completion(pulled["r1"])])
    assert await scene.place("g", "r1") == [StepStatus.STALE]
    assert await scene.place("third", "r1") == [StepStatus.STALE]


async def test_placing_under_the_queue_id_of_an_earlier_request_is_stale(scene: Scenario) -> None:
    await scene.accept("r1")
    old = scene.wanted("r1", "g")
    await scene.mirror("cancel", key_of("r1"), CANCELLED)
    await scene.mirror.expire_result(key_of("r1"))
    await scene.accept("r1")
    assert await scene.mirror("place", scene.planner, [placement("g")], [old]) == [StepStatus.STALE]
    assert await scene.place("g", "r1") == [StepStatus.DONE]


async def test_an_open_group_stays_where_it_is(scene: Scenario) -> None:
    await scene.register("b")
    await scene.queue_up("g", "r1")
    await scene.queue_up("g", "r2", instance="b")
    assert (await scene.queue_of("a"), await scene.queue_of("b")) == (["g"], [])


async def test_a_drained_group_is_opened_on_the_instance_named(scene: Scenario) -> None:
    await scene.register("b")
    await scene.run("r1")
    assert await scene.queue_of("a") == []
    await scene.accept("r2")
    await scene.place("g", "r2", instance="b", first_deadline_s=500.0)
    assert await scene.queue_of("b") == ["g"]
    group = (await scene.mirror("overview")).groups["g"]
    assert (group.instance, group.live, group.waiting, group.first_deadline_s) == ("b", 2, 1, 500.0)


async def test_groups_of_unknown_instances_are_unassigned(scene: Scenario) -> None:
    await scene.queue_up("g", "r1", instance="nobody")
    await scene.queue_up("h", "r2", instance="unassigned")
    assert await scene.queue_of("unassigned") == ["g", "h"]
    applied = await scene.apply(1, segment("a", 0, "g"), touching=("a", "unassigned"))
    assert (applied.applied, applied.moved) == (True, 1)
    assert (await scene.queue_of("a"), await scene.queue_of("unassigned")) == (["g"], ["h"])


async def test_place_checks_its_arguments(scene: Scenario) -> None:
    await scene.accept("r1")
    with pytest.raises(ValueError, match=r".*"):
        await scene.mirror("place", scene.planner, [placement("g")], [scene.wanted("r1", "other")])
    with pytest.raises(ValueError, match=r".*"):
        await scene.mirror("place", scene.planner, [placement("g")], [scene.wanted("r1", "g")] * (BATCH_MAX + 1))
    with pytest.raises(ValueError, match=r".*"):
        await scene.mirror("place", scene.planner, [placement(f"g{i}") for i in range(BATCH_MAX + 1)], [])
    assert await scene.mirror("place", scene.planner, [placement("g")], []) == []


async def test_a_planner_that_lost_its_lease_changes_nothing(scene: Scenario) -> None:
    mirror, old = scene.mirror, scene.planner
    await scene.queue_up("g", "r1")
    await scene.accept("r2")
    await mirror.expire_lease(PLANNER_ROLE)
    before = await mirror.dump()
    chunk = PlanChunk(plan_version=9, versions=await scene.versions("a"), segments=[segment("a", 0, "g")])
    for held_by_another in (False, True):
        if held_by_another:
            await mirror("acquire_lease", PLANNER_ROLE, "p2", TTL_S, "host:2")
            before = await mirror.dump()
        with pytest.raises(LeaseLost):
            await mirror("place", old, [placement("g")], [scene.wanted("r2", "g")])
        with pytest.raises(LeaseLost):
            await mirror("apply_plan", old, chunk)
        with pytest.raises(LeaseLost):
            await mirror("reclaim", old, scene.incarnation, FAILURE)
        with pytest.raises(LeaseLost):
            await mirror("forget_instance", old, "a")
        assert await mirror.dump() == before


async def test_reclaim_returns_requests_of_a_dead_agent_to_their_places(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g1", "r1", "r2")
    await scene.queue_up("g2", "r3")
    await scene.pull()
    await scene.queue_up("g3", "r4")
    assert await mirror("reclaim", scene.planner, scene.incarnation, FAILURE) == 0  # its lease is alive
    await mirror.expire_lease(scene.incarnation)
    assert await mirror("reclaim", scene.planner, scene.incarnation, FAILURE) == 3
    assert await scene.queue_of() == ["g1", "g2", "g3"]
    assert [request.key.request_id for request in await mirror("waiting", "g1", 0, 10)] == ["r1", "r2"]
    assert live(await mirror("find", key_of("r1"))).failed_attempts == 0
    assert await mirror("reclaim", scene.planner, scene.incarnation, FAILURE) == 0
    assert (await mirror("overview")).incarnations == {}
    assert await mirror("reclaim", scene.planner, "nobody/1", FAILURE) == 0


async def test_reclaim_takes_at_most_a_batch(scene: Scenario) -> None:
    mirror = scene.mirror
    names = [f"r{i}" for i in range(BATCH_MAX + 20)]
    with mirror.compared_at_the_end():
        await scene.accept(*names, prompt_tokens=1)
        for first in range(0, len(names), BATCH_MAX):
            await scene.place("g", *names[first : first + BATCH_MAX])
            await scene.pull(count=BATCH_MAX)
    await mirror.expire_lease(scene.incarnation)
    assert await mirror("reclaim", scene.planner, scene.incarnation, FAILURE) == BATCH_MAX
    assert await mirror("reclaim", scene.planner, scene.incarnation, FAILURE) == 20
    assert await mirror("reclaim", scene.planner, scene.incarnation, FAILURE) == 0
    assert (await mirror("overview")).groups["g"].waiting == len(names)


async def test_requests_ahead_counts_waiting_requests_in_front(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g1", "r1", "r2", "r3")
    await scene.queue_up("g2", "r4", "r5")
    await scene.accept("r6")
    ahead = [await mirror("requests_ahead", key_of(f"r{i}")) for i in range(1, 7)]
    assert ahead == [*(("a", number) for number in range(5)), ("", 0)]
    pulled = await scene.pull(count=1)
    ahead = [await mirror("requests_ahead", key_of(f"r{i}")) for i in range(1, 6)]
    assert ahead == [("", 0), *(("a", number) for number in range(4))]
    await mirror("complete", scene.incarnation, [completion(pulled["r1"])])
    assert await mirror("requests_ahead", key_of("r1")) == ("", 0)
    with pytest.raises(NotFound):
        await mirror("requests_ahead", key_of("nobody"))


async def test_waiting_pages_through_a_group(scene: Scenario) -> None:
    mirror = scene.mirror
    names = [f"r{i}" for i in range(5)]
    await scene.queue_up("g", *names)
    page = await mirror("waiting", "g", 0, 3)
    assert [request.key.request_id for request in page] == names[:3]
    page = await mirror("waiting", "g", page[-1].acceptance_number, 3)
    assert [request.key.request_id for request in page] == names[3:]
    assert await mirror("waiting", "g", page[-1].acceptance_number, 3) == []
    assert await mirror("waiting", "nobody", 0, 3) == []


async def test_the_overview_counts(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g", "r1", "r2")
    await scene.accept("r3")
    await scene.pull(count=1)
    overview = await mirror("overview")
    assert (overview.accepted_count, overview.live, overview.unplaced) == (3, 3, 1)
    queue = next(queue for queue in overview.virtual_queues if queue.instance == "a")
    assert (list(queue.group_ids), queue.running) == (["g"], 1)
    assert await mirror("read_events", overview.last_event_id, 0, 10) == []
    await mirror("cancel", key_of("r1"), CANCELLED)
    assert len(await mirror("read_events", overview.last_event_id, 0, 10)) == 1


async def test_an_overview_may_have_some_of_the_groups(scene: Scenario) -> None:
    """The queues have all of theirs, whichever are requested; a group that is not there is left out, one that drained has its counts."""
    mirror = scene.mirror
    for name in ("g1", "g2", "g3"):
        await scene.queue_up(name, f"{name}-first", f"{name}-second")
    await scene.pull(count=3)
    whole = await mirror("overview")
    assert (whole.groups["g1"].instance, whole.groups["g1"].last_instance, whole.groups["g1"].waiting) == ("", "a", 0)
    some = await mirror("overview", ["g3", "nobody", "g1"])
    assert dict(some.groups) == {name: whole.groups[name] for name in ("g1", "g3")}
    assert replace(some, groups=whole.groups) == whole
    assert (await mirror("overview", [])).groups == {}
    with pytest.raises(ValueError, match=str(BATCH_MAX)):
        await mirror("overview", [f"g{number}" for number in range(BATCH_MAX + 1)])


async def test_returning_a_request_whose_instance_was_forgotten_leaves_it_unassigned(scene: Scenario) -> None:
    """The queue that the group was open on last is gone."""
    mirror = scene.mirror
    pulled = await scene.run("r1")
    b = await scene.register("b")
    await scene.accept("r2")
    await scene.place("g", "r2", instance="b")
    await mirror("complete", b.role, [completion(request) for request in (await scene.pull(lease=b)).values()])
    await mirror("deregister", b)
    assert await mirror("forget_instance", scene.planner, "b")
    assert await mirror("requeue", scene.incarnation, [owned(pulled["r1"])], RequeueCause.EVICTED, FAILURE) == [StepStatus.DONE]
    assert await scene.queue_of("unassigned") == ["g"]


async def test_shedding_fails_either_end_of_a_group_down_to_the_kept_ones(scene: Scenario) -> None:
    """QLM A.3, c: a planner fails what would be late anyway."""
    mirror = scene.mirror
    await scene.accept("r1", "r2", "r3", "r4", "r5")
    await scene.place("g", "r1", "r2", "r3", "r4", "r5")
    assert await mirror("shed", scene.planner, "g", 4, 10, False, FAILURE) == 1
    assert await mirror("shed", scene.planner, "g", 4, 10, False, FAILURE) == 0, "a repeat ends no more"
    assert await mirror("shed", scene.planner, "g", 0, 2, True, FAILURE) == 2
    waiting = await mirror("waiting", "g", 0, 10)
    assert [request.key.request_id for request in waiting] == ["r3", "r4"]
    for name in ("r1", "r2", "r5"):
        ended = await mirror("find", key_of(name))
        assert ended.state is RequestState.FAILED
    assert await mirror("shed", scene.planner, "g", 0, 10, False, FAILURE) == 2
    assert not any(queue.group_ids for queue in (await mirror("overview")).virtual_queues)
    assert await mirror("shed", scene.planner, "g", 0, 10, False, FAILURE) == 0, "the group is gone"
    assert await mirror.real.leftovers() == []


async def test_shedding_takes_nothing_that_runs_and_needs_the_lease(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.accept("r1", "r2")
    await scene.place("g", "r1", "r2")
    await scene.pull(1)
    assert await mirror("shed", scene.planner, "g", 0, 10, True, FAILURE) == 1
    assert (await mirror("find", key_of("r1"))).state is RequestState.RUNNING
    await mirror.expire_lease(PLANNER_ROLE)
    with pytest.raises(LeaseLost):
        await mirror("shed", scene.planner, "g", 0, 10, True, FAILURE)
    with pytest.raises(ValueError, match=str(BATCH_MAX)):
        await mirror("shed", scene.planner, "g", 0, BATCH_MAX + 1, True, FAILURE)
