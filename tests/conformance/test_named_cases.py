"""The histories that a queue like this one gets wrong: each is named, and plays in a few lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from qlm.api.v1.request_pb2 import Result
from qlm_core.vocabulary.errors import LeaseLost
from qlm_core.vocabulary.request import RequestState
from qlm_queue.values import PLANNER_ROLE, Bounds, ControlKind, PlanChunk, QueueSegment, RequeueCause, StepStatus

from .mirror import Mirror, live
from .scenario import CANCELLED, EXPIRED, FAILURE, ROOMY, TTL_S, Scenario, acceptance, completion, emission, key_of, owned, tokens

DONE, STALE = StepStatus.DONE, StepStatus.STALE


async def test_a_request_arrives_as_its_group_drains(scene: Scenario) -> None:
    """The planner decides to add r2 to the open group g; before it says so, the agent pulls the last waiting request of g."""
    await scene.queue_up("g", "r1")
    await scene.accept("r2")
    first = await scene.pull()
    assert await scene.queue_of() == []
    earlier = len(await scene.mirror("read_control", "a", "0", 0))
    assert await scene.place("g", "r2") == [DONE]
    assert await scene.queue_of() == ["g"]
    assert [entry.kind for entry in await scene.mirror("read_control", "a", "0", 0)][earlier:] == [ControlKind.WAKE]
    second = await scene.pull()
    assert list(second) == ["r2"]
    await scene.mirror("complete", scene.incarnation, [completion(first["r1"]), completion(second["r2"])])
    assert await scene.mirror.real.leftovers() == []


async def test_a_request_arrives_as_its_group_ends(scene: Scenario) -> None:
    """As above, but the last request of g has ended, and the group's record with it."""
    pulled = await scene.run("r1")
    await scene.accept("r2")
    await scene.mirror("complete", scene.incarnation, [completion(pulled["r1"])])
    assert (await scene.mirror("overview")).groups == {}
    assert await scene.place("g", "r2", first_deadline_s=7.0) == [DONE]
    assert (await scene.mirror("overview")).groups["g"].first_deadline_s == 7.0
    assert list(await scene.pull()) == ["r2"]


@pytest.mark.parametrize("end", ["cancel", "expire"])
@pytest.mark.parametrize("state", [RequestState.ACCEPTED, RequestState.PLACED, RequestState.RUNNING])
async def test_the_end_of_a_request_by_its_client_or_clock(scene: Scenario, end: str, state: RequestState) -> None:
    """No planner is needed for it."""
    mirror = scene.mirror
    await scene.accept("r1", expire_after_s=1_000.0)
    if state is not RequestState.ACCEPTED:
        await scene.place("g", "r1")
    pulled = await scene.pull() if state is RequestState.RUNNING else {}
    await mirror.expire_lease(PLANNER_ROLE)
    if end == "cancel":
        assert await mirror("cancel", key_of("r1"), CANCELLED) is RequestState.CANCELLED
    else:
        await mirror.expire_request(key_of("r1"))
        assert await mirror("expire", EXPIRED) == 1
    ended = RequestState.CANCELLED if end == "cancel" else RequestState.EXPIRED
    assert (await mirror("find", key_of("r1"))).state is ended
    for request in pulled.values():  # the agent that has not heard of it
        assert await mirror("emit", scene.incarnation, [emission(request, 0, [1])]) == [STALE]
        assert await mirror("requeue", scene.incarnation, [owned(request)], RequeueCause.FAILED, FAILURE) == [STALE]
        assert await mirror("complete", scene.incarnation, [completion(request)]) == [STALE]
    assert await mirror("read_arrivals", 0, 10) == []
    assert await mirror("read_unplaced", "", 10) == []
    assert await mirror("owned", scene.incarnation) == []
    assert (await mirror("accept", acceptance(key_of("r1"), expire_after_s=1_000.0))).state is ended
    assert await mirror.real.leftovers() == []


async def test_a_zombie_changes_nothing_after_its_requests_were_taken(scene: Scenario) -> None:
    """An agent stops for a while, loses its lease and its requests, and wakes up."""
    mirror, zombie = scene.mirror, scene.agent
    old = (await scene.run("r1"))["r1"]
    await mirror("emit", zombie.role, [emission(old, 0, [1, 2])])
    await mirror.expire_lease(zombie.role)
    assert await mirror("reclaim", scene.planner, zombie.role, FAILURE) == 1
    fresh = await scene.register("a")
    new = (await scene.pull(lease=fresh))["r1"]
    assert (new.progress, new.attempt, new.failed_attempts) == (tokens(1, 2), 2, 0)
    await mirror("emit", fresh.role, [emission(new, 2, [3])])
    before = await mirror.dump()
    with pytest.raises(LeaseLost):
        await mirror("renew_lease", zombie, TTL_S)
    with pytest.raises(LeaseLost):
        await mirror("pull", zombie, "m", ROOMY)
    with pytest.raises(LeaseLost):
        await mirror("describe", zombie, b"alive")
    with pytest.raises(LeaseLost):
        await mirror("deregister", zombie)
    for attempt in (old.attempt, new.attempt):
        assert await mirror("emit", zombie.role, [emission(replace(old, attempt=attempt), 2, [9])]) == [STALE]
        assert await mirror("complete", zombie.role, [completion(replace(old, attempt=attempt))]) == [STALE]
        assert await mirror("unpull", zombie.role, [owned(old, attempt)]) == [STALE]
        for cause in RequeueCause:
            assert await mirror("requeue", zombie.role, [owned(old, attempt)], cause, FAILURE) == [STALE]
    assert await mirror("owned", zombie.role) == []
    assert await mirror.dump() == before
    await mirror("complete", fresh.role, [completion(new, 3, [4])])
    assert list(Result.FromString((await mirror("find", key_of("r1"))).result).output_token_ids) == [1, 2, 3, 4]


async def test_a_completion_of_a_lost_attempt_does_not_pass_for_the_end_by_failure(make_mirror: Callable[..., Mirror]) -> None:
    """r1 ended as FAILED since it was lost too often; the agent that was lost says that it failed it itself."""
    mirror = make_mirror(Bounds(pulls_max=3))
    await mirror.real.queue.start()
    scene = await Scenario(mirror).open()
    agent = scene.agent
    await scene.queue_up("g", "r1")
    for _ in range(3):
        request = (await scene.pull(lease=agent))["r1"]
        await mirror.expire_lease(agent.role)
        assert await mirror("reclaim", scene.planner, agent.role, FAILURE) == 1
        dead, agent = agent, await scene.register("a")
    assert (await mirror("find", key_of("r1"))).state is RequestState.FAILED
    assert await mirror("complete", dead.role, [completion(request, state=RequestState.FAILED)]) == [STALE]
    assert await mirror("complete", dead.role, [completion(request)]) == [STALE]


async def test_a_group_is_pulled_while_the_plan_that_moves_it_is_made(scene: Scenario) -> None:
    """g drains between the planner's look and its chunk: the version is the same, the group is left out."""
    mirror = scene.mirror
    await scene.register("b")
    await scene.queue_up("g", "r1")
    known = await scene.versions("a", "b")
    pulled = await scene.pull()
    chunk = PlanChunk(plan_version=1, versions=known, segments=[QueueSegment(instance="b", start=0, group_ids=["g"])])
    applied = await mirror("apply_plan", scene.planner, chunk)
    assert (applied.applied, applied.moved) == (True, 0)
    await mirror("requeue", scene.incarnation, [owned(pulled["r1"])], RequeueCause.EVICTED, FAILURE)
    assert (await scene.queue_of("a"), await scene.queue_of("b")) == (["g"], [])


async def test_a_group_moves_while_its_requests_run(scene: Scenario) -> None:
    """Running requests return to the group, wherever that is by then."""
    mirror = scene.mirror
    b = await scene.register("b")
    await scene.queue_up("g", "r1", "r2")
    pulled = await scene.pull(count=1)
    chunk = PlanChunk(
        plan_version=1, versions=await scene.versions("a", "b"), segments=[QueueSegment(instance="b", start=0, group_ids=["g"])]
    )
    assert (await mirror("apply_plan", scene.planner, chunk)).moved == 1
    await mirror("requeue", scene.incarnation, [owned(pulled["r1"])], RequeueCause.EVICTED, FAILURE)
    assert list(await scene.pull(lease=b)) == ["r1", "r2"]


async def test_a_request_id_is_used_again_after_its_window(scene: Scenario) -> None:
    """A caller that still knows the first request by its key must not touch the second."""
    mirror = scene.mirror
    first = (await scene.run("r1"))["r1"]
    await mirror("cancel", key_of("r1"), CANCELLED)
    await mirror.expire_result(key_of("r1"))
    await scene.accept("r1")
    await scene.place("g", "r1")
    second = (await scene.pull())["r1"]
    assert (first.attempt, second.attempt) == (1, 1)
    assert await mirror("emit", scene.incarnation, [emission(first, 0, [1])]) == [STALE]
    assert await mirror("complete", scene.incarnation, [completion(first)]) == [STALE]
    assert await mirror("unpull", scene.incarnation, [owned(first)]) == [STALE]
    await mirror("complete", scene.incarnation, [completion(second)])
    assert await mirror("complete", scene.incarnation, [completion(first)]) == [STALE]


async def test_agents_serve_and_requeue_with_no_planner(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g", "r1", "r2")
    await mirror.expire_lease(PLANNER_ROLE)
    pulled = await scene.pull(count=1)
    await mirror("requeue", scene.incarnation, [owned(pulled["r1"])], RequeueCause.EVICTED, FAILURE)
    pulled = await scene.pull()
    await mirror("complete", scene.incarnation, [completion(request) for request in pulled.values()])
    await scene.accept("r3")
    assert live(await mirror("find", key_of("r3"))).state is RequestState.ACCEPTED
