"""regroup: waiting requests go from one group to another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm_core.vocabulary.errors import LeaseLost
from qlm_core.vocabulary.request import RequestState
from qlm_queue.values import BATCH_MAX, PLANNER_ROLE, ControlKind, GroupPlacement, RequeueCause, StepStatus, WaitingRequest

from .mirror import live
from .scenario import CANCELLED, FAILURE, TTL_S, Scenario, completion, emission, key_of, owned, placement

DONE, STALE = StepStatus.DONE, StepStatus.STALE


async def _regroup(scene: Scenario, source: str, into: GroupPlacement, *names: str) -> list[StepStatus]:
    chosen = [WaitingRequest(queue_id=scene.receipts[name].queue_id, key=key_of(name)) for name in names]
    return list(await scene.mirror("regroup", scene.planner, source, into, chosen))


async def _waiting(scene: Scenario, group_id: str) -> list[str]:
    return [request.key.request_id for request in await scene.mirror("waiting", group_id, 0, 100)]


async def test_a_group_is_split_behind_itself(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g1", "r1", "r2", "r3", "r4")
    await scene.queue_up("g2", "r5")
    versions = await scene.versions("a")
    into = placement("new", before="g2", first_deadline_s=70.5, last_deadline_s=80.25, slo_least_s=5.0)
    assert await _regroup(scene, "g1", into, "r3", "r4") == [DONE, DONE]
    assert await scene.queue_of() == ["g1", "new", "g2"]
    groups = (await mirror("overview")).groups
    assert [(groups[name].waiting, groups[name].live, groups[name].waiting_prompt_tokens) for name in ("g1", "new")] == [(2, 2, 20)] * 2
    assert (groups["new"].first_deadline_s, groups["new"].last_deadline_s, groups["new"].slo_least_s) == (70.5, 80.25, 5.0)
    assert groups["new"].meta == {"model": "m", "slo_class": "32s"}
    assert (await _waiting(scene, "g1"), await _waiting(scene, "new")) == (["r1", "r2"], ["r3", "r4"])
    assert await scene.versions("a") == {"a": versions["a"] + 1}
    assert list(await scene.pull()) == ["r1", "r2", "r3", "r4", "r5"]


async def test_merged_requests_are_in_the_order_of_acceptance(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.accept("r1", "r2", "r3", "r4")
    await scene.place("g1", "r1", "r3", first_deadline_s=50.0)
    await scene.place("g2", "r2", "r4", first_deadline_s=60.0, slo_least_s=30.0)
    assert await _regroup(scene, "g1", placement("g2", first_deadline_s=50.0, slo_least_s=20.0), "r1", "r3") == [DONE, DONE]
    assert await scene.queue_of() == ["g2"]
    overview = await mirror("overview")
    assert list(overview.groups) == ["g2"], "a group without requests is removed"
    assert (overview.groups["g2"].first_deadline_s, overview.groups["g2"].slo_least_s) == (50.0, 20.0)
    assert list(await scene.pull()) == ["r1", "r2", "r3", "r4"]
    kinds = [entry.kind for entry in await mirror("read_control", "a", "0", 0)]
    assert kinds == [ControlKind.WAKE, ControlKind.WAKE, ControlKind.HEAD_CHANGED], "the head changed"


async def test_a_source_with_running_requests_is_kept_until_they_end(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g1", "r1", "r2")
    await scene.queue_up("g2", "r3")
    pulled = await scene.pull(count=1)
    assert await _regroup(scene, "g1", placement("g2"), "r1", "r2") == [STALE, DONE], "what runs stays"
    group = (await mirror("overview")).groups["g1"]
    assert (group.instance, group.last_instance, group.waiting, group.live, group.waiting_prompt_tokens) == ("", "a", 0, 1, 0)
    assert await mirror("requeue", scene.incarnation, [owned(pulled["r1"])], RequeueCause.DRAINED, FAILURE) == [DONE]
    assert await scene.queue_of() == ["g1", "g2"], "it returns to its own group"


async def test_only_what_waits_where_the_caller_believes(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g1", "r1", "r2", "r3")
    await scene.queue_up("g2", "r4")
    await scene.accept("r5")
    await mirror("cancel", key_of("r2"), CANCELLED)
    before = await mirror.dump()
    assert await _regroup(scene, "nowhere", placement("new"), "r1", "r2", "r4", "r5") == [STALE] * 4
    assert await _regroup(scene, "g2", placement("new"), "r1", "r2", "r5") == [STALE] * 3
    assert await mirror.dump() == before, "no group was opened"
    assert await _regroup(scene, "g1", placement("new"), "r1", "r1", "r2", "r4") == [DONE, DONE, STALE, STALE]
    assert await _waiting(scene, "new") == ["r1"]
    assert live(await mirror("find", key_of("r5"))).state is RequestState.ACCEPTED


async def test_a_repeat_changes_nothing(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g1", "r1", "r2")
    assert await _regroup(scene, "g1", placement("new"), "r1", "r2") == [DONE, DONE]
    before = await mirror.dump()
    assert await _regroup(scene, "g1", placement("new", first_deadline_s=1.0), "r1", "r2") == [DONE, DONE]
    assert await mirror.dump() == before
    pulled = await scene.pull(count=1)
    await mirror("complete", scene.incarnation, [completion(pulled["r1"])])
    assert await _regroup(scene, "g1", placement("new"), "r1", "r2") == [STALE, DONE]


async def test_progress_and_attempts_go_along(scene: Scenario) -> None:
    mirror = scene.mirror
    pulled = await scene.run("r1")
    await mirror("emit", scene.incarnation, [emission(pulled["r1"], 0, [7, 8, 9])])
    await mirror("requeue", scene.incarnation, [owned(pulled["r1"])], RequeueCause.EVICTED, FAILURE)
    assert await _regroup(scene, "g", placement("long"), "r1") == [DONE]
    again = (await scene.pull())["r1"]
    assert (again.group_id, again.attempt, len(again.progress)) == ("long", 2, 12)
    await mirror("complete", scene.incarnation, [completion(again, 3, [10])])
    assert await mirror.real.leftovers() == []


async def test_groups_of_other_models_and_kinds_take_nothing(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g1", "r1")
    await scene.queue_up("g2", "r2", model="n")
    kinds = placement("g3")
    kinds = replace(kinds, meta={**kinds.meta, "slo_kind": "priority"})
    before = await mirror.dump()
    for into in (placement("new", model="n"), placement("g2", model="n"), placement("g2"), kinds):
        assert await _regroup(scene, "g1", into, "r1") == [STALE]
    assert await mirror.dump() == before


async def test_a_group_for_an_instance_that_is_gone_is_unassigned(scene: Scenario) -> None:
    await scene.queue_up("g1", "r1", "r2")
    assert await _regroup(scene, "g1", placement("new", "nobody"), "r2") == [DONE]
    assert (await scene.queue_of("a"), await scene.queue_of("unassigned")) == (["g1"], ["new"])


async def test_regrouping_needs_the_lease_and_has_a_bound(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g1", "r1")
    chosen = [WaitingRequest(queue_id=scene.receipts["r1"].queue_id, key=key_of("r1"))]
    with pytest.raises(ValueError, match=str(BATCH_MAX)):
        await mirror("regroup", scene.planner, "g1", placement("new"), chosen * (BATCH_MAX + 1))
    with pytest.raises(ValueError, match="one"):
        await mirror("regroup", scene.planner, "g1", placement("g1"), chosen)
    old = scene.planner
    await mirror.expire_lease(PLANNER_ROLE)
    await mirror("acquire_lease", PLANNER_ROLE, "p2", TTL_S, "host:2")
    before = await mirror.dump()
    with pytest.raises(LeaseLost):
        await mirror("regroup", old, "g1", placement("new"), chosen)
    assert await mirror.dump() == before
