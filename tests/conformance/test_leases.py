"""Leases of roles, and instances with their incarnations."""

from __future__ import annotations

import pytest

from qlm_core.vocabulary.errors import LeaseLost
from qlm_core.vocabulary.pauses import PauseKind
from qlm_queue.values import ESTIMATOR_ROLE, PLANNER_ROLE, WAITS_BYTES_MAX, Lease

from .mirror import Mirror
from .scenario import FAILURE, ROOMY, TTL_S, Scenario, completion


async def test_a_role_has_one_holder_and_each_holder_a_higher_fence(mirror: Mirror) -> None:
    first = await mirror("acquire_lease", PLANNER_ROLE, "one", TTL_S, "host:1")
    assert await mirror("acquire_lease", PLANNER_ROLE, "two", TTL_S, "host:2") is None
    assert await mirror("leader_address", PLANNER_ROLE) == "host:1"
    await mirror("release_lease", first)
    assert await mirror("leader_address", PLANNER_ROLE) == ""
    second = await mirror("acquire_lease", PLANNER_ROLE, "two", TTL_S, "host:2")
    assert second.fence > first.fence
    assert await mirror("leader_address", PLANNER_ROLE) == "host:2"


async def test_acquiring_again_with_the_same_nonce_returns_the_same_lease(mirror: Mirror) -> None:
    first = await mirror("acquire_lease", PLANNER_ROLE, "one", TTL_S, "host:1")
    assert await mirror("acquire_lease", PLANNER_ROLE, "one", TTL_S, "host:1") == first


async def test_an_expired_lease_is_never_renewed(mirror: Mirror) -> None:
    lease = await mirror("acquire_lease", PLANNER_ROLE, "one", TTL_S, "host:1")
    await mirror("renew_lease", lease, TTL_S)
    await mirror.expire_lease(PLANNER_ROLE)
    with pytest.raises(LeaseLost):
        await mirror("renew_lease", lease, TTL_S)
    assert await mirror("leader_address", PLANNER_ROLE) == ""
    again = await mirror("acquire_lease", PLANNER_ROLE, "one", TTL_S, "host:1")
    assert again != lease  # even the same holder starts with a new fence
    with pytest.raises(LeaseLost):
        await mirror("renew_lease", lease, TTL_S)


async def test_releasing_a_lost_lease_does_not_take_it_from_its_new_holder(mirror: Mirror) -> None:
    old = await mirror("acquire_lease", PLANNER_ROLE, "one", TTL_S, "host:1")
    await mirror.expire_lease(PLANNER_ROLE)
    await mirror("acquire_lease", PLANNER_ROLE, "two", TTL_S, "host:2")
    await mirror("release_lease", old)
    assert await mirror("leader_address", PLANNER_ROLE) == "host:2"


async def test_a_short_lease_runs_out_by_itself(mirror: Mirror) -> None:
    """The only test that waits for the server's own clock."""
    await mirror.real.queue.acquire_lease("short", "one", 0.001, "host:1")
    await mirror.twin.queue.acquire_lease("short", "one", 0.001, "host:1")
    clock = getattr(mirror.real, "clock", None)
    for subject_clock in (clock, mirror.twin.clock):
        if subject_clock is not None:
            subject_clock.now_s += 1.0
    started_s = await mirror.real.queue.server_time_s()
    while await mirror.real.queue.leader_address("short"):
        assert await mirror.real.queue.server_time_s() < started_s + 5.0
    await mirror.compare("expiry")


async def test_roles_are_independent(mirror: Mirror) -> None:
    planner = await mirror("acquire_lease", PLANNER_ROLE, "one", TTL_S, "host:1")
    estimator = await mirror("acquire_lease", ESTIMATOR_ROLE, "two", TTL_S, "host:2")
    await mirror("release_lease", planner)
    await mirror("renew_lease", estimator, TTL_S)
    with pytest.raises(LeaseLost):
        await mirror("place", estimator, [], [])


async def test_profiles_are_published_by_the_leader_alone(mirror: Mirror) -> None:
    assert await mirror("read_profiles") == (0, b"")
    lease = await mirror("acquire_lease", ESTIMATOR_ROLE, "one", TTL_S, "host:1")
    await mirror("publish_profiles", lease, 7, b"\x00\xffsnapshot")
    assert await mirror("read_profiles") == (7, b"\x00\xffsnapshot")
    await mirror.expire_lease(ESTIMATOR_ROLE)
    with pytest.raises(LeaseLost):
        await mirror("publish_profiles", lease, 8, b"late")
    assert await mirror("read_profiles") == (7, b"\x00\xffsnapshot")


async def test_waits_are_published_by_the_leading_planner_alone(mirror: Mirror) -> None:
    assert (await mirror("read_waits")).body == b""
    lease = await mirror("acquire_lease", PLANNER_ROLE, "one", TTL_S, "host:1")
    await mirror("publish_waits", lease, b"\x08\x01")
    await mirror("pause", PauseKind.TENANT, "a:b")
    read = await mirror("read_waits")
    assert (read.body, read.accepted_count, read.live, [pause.name for pause in read.pauses]) == (b"\x08\x01", 0, 0, ["a:b"])
    with pytest.raises(ValueError, match="bytes"):
        await mirror("publish_waits", lease, b"x" * (WAITS_BYTES_MAX + 1))
    await mirror.expire_lease(PLANNER_ROLE)
    with pytest.raises(LeaseLost):
        await mirror("publish_waits", lease, b"\x08\x02")
    assert (await mirror("read_waits")).body == b"\x08\x01"


async def test_registering_makes_an_incarnation_and_a_virtual_queue(mirror: Mirror) -> None:
    incarnation, lease = await mirror("register", "a100-0", "n1", b"body", TTL_S)
    assert incarnation == "a100-0/1"
    assert lease.role == incarnation
    assert await mirror("register", "a100-0", "n1", b"body", TTL_S) == (incarnation, lease)
    overview = await mirror("overview")
    assert [queue.instance for queue in overview.virtual_queues] == ["a100-0", "unassigned"]
    assert [(record.name, record.incarnation, record.alive, record.body) for record in overview.instances] == [
        ("a100-0", incarnation, True, b"body")
    ]
    assert overview.incarnations == {incarnation: True}


async def test_a_new_incarnation_replaces_the_old_one_but_not_its_requests(scene: Scenario) -> None:
    mirror = scene.mirror
    pulled = await scene.run("r1")
    await scene.queue_up("g2", "r2")
    old = scene.agent
    new = await scene.register("a")
    assert new.role == "a/2"
    with pytest.raises(LeaseLost):
        await mirror("pull", old, "m", ROOMY)
    with pytest.raises(LeaseLost):
        await mirror("describe", old, b"old body")
    await mirror("renew_lease", old, TTL_S)  # the old incarnation may still end what it owns
    assert [owned.key.request_id for owned in await mirror("owned", old.role)] == ["r1"]
    assert await mirror("owned", new.role) == []
    assert (await mirror("overview")).incarnations == {"a/1": True, "a/2": True}
    assert list(await scene.pull(lease=new)) == ["r2"]
    assert await mirror("complete", old.role, [completion(pulled["r1"])]) == ["done"]


async def test_an_incarnation_with_a_successor_and_no_call_for_half_a_lease_is_lost(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.run("r1")
    old = scene.agent
    # Half of this lease is all of the old one's.
    new, _ = await mirror("register", "a", "n9", b"", 2 * TTL_S)
    assert (await mirror("overview")).incarnations == {old.role: False, new: True}
    with pytest.raises(LeaseLost):
        await mirror("renew_lease", old, TTL_S)
    assert await mirror("reclaim", scene.planner, old.role, FAILURE) == 1


async def test_the_same_nonce_after_the_lease_ran_out_is_a_new_incarnation(mirror: Mirror) -> None:
    first, _ = await mirror("register", "a", "n1", b"", TTL_S)
    await mirror.expire_lease(first)
    second, _ = await mirror("register", "a", "n1", b"", TTL_S)
    assert (first, second) == ("a/1", "a/2")


async def test_describe_replaces_the_body_while_the_lease_holds(scene: Scenario) -> None:
    mirror = scene.mirror
    await mirror("describe", scene.agent, b"another")
    assert (await mirror("overview")).instances[0].body == b"another"
    await mirror.expire_lease(scene.incarnation)
    with pytest.raises(LeaseLost):
        await mirror("describe", scene.agent, b"late")
    assert (await mirror("overview")).instances[0].body == b"another"
    with pytest.raises(LeaseLost):
        await mirror("describe", Lease(role="b/1", token="1:x"), b"of nobody")


async def test_deregister_ends_an_incarnation_and_leaves_its_groups(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g", "r1")
    await mirror("deregister", scene.agent)
    overview = await mirror("overview")
    assert overview.incarnations == {}
    assert not overview.instances[0].alive
    assert await scene.queue_of("a") == ["g"]
    with pytest.raises(LeaseLost):
        await mirror("deregister", scene.agent)
    with pytest.raises(LeaseLost):
        await mirror("pull", scene.agent, "m", ROOMY)


async def test_requests_of_a_deregistered_incarnation_wait_for_reclaim(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.run("r1")
    await mirror("deregister", scene.agent)
    assert (await mirror("overview")).incarnations == {scene.incarnation: False}
    assert await mirror("reclaim", scene.planner, scene.incarnation, FAILURE) == 1
    assert await mirror("reclaim", scene.planner, scene.incarnation, FAILURE) == 0
    assert (await mirror("overview")).incarnations == {}


async def test_an_instance_is_forgotten_when_it_is_gone_and_its_queue_empty(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g", "r1")
    assert await mirror("forget_instance", scene.planner, "a") is False  # alive
    await scene.pull()
    await mirror.expire_lease(scene.incarnation)
    assert await mirror("forget_instance", scene.planner, "a") is False  # owns a request
    assert await mirror("reclaim", scene.planner, scene.incarnation, FAILURE) == 1
    assert await mirror("forget_instance", scene.planner, "a") is False  # its queue holds a group
    again = await scene.register("a")
    await scene.pull(lease=again)
    await mirror("deregister", again)
    assert await mirror("reclaim", scene.planner, again.role, FAILURE) == 1
    third = await scene.register("a")
    done = await scene.pull(lease=third)
    await mirror("complete", third.role, [completion(done["r1"])])
    await mirror("deregister", third)
    with pytest.raises(LeaseLost):
        await mirror("forget_instance", third, "a")  # not a planner's lease
    assert await mirror("forget_instance", scene.planner, "a") is True
    assert [queue.instance for queue in (await mirror("overview")).virtual_queues] == ["unassigned"]
    assert await mirror("forget_instance", scene.planner, "a") is False
