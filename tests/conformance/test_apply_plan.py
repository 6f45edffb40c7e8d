"""apply_plan: groups are moved and ordered by compare and set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm.internal.v1.events_pb2 import EventKind, RequestEvents
from qlm_queue.values import BATCH_MAX, ControlKind, PlanChunk

from .scenario import CANCELLED, Scenario, key_of, segment


async def test_a_plan_reorders_and_moves_groups(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.register("b")
    for number in range(5):
        await scene.queue_up(f"g{number}", f"r{number}")
    before = await scene.versions("a", "b")
    applied = await scene.apply(1, segment("a", 0, "g3", "g1"), segment("b", 0, "g0"), touching=("a", "b"))
    assert (applied.applied, applied.moved) == (True, 1)
    assert (await scene.queue_of("a"), await scene.queue_of("b")) == (["g3", "g1", "g2", "g4"], ["g0"])
    assert applied.versions == await scene.versions("a", "b")
    assert all(applied.versions[name] > before[name] for name in before)
    assert (await mirror("overview")).plan_version == 1
    assert [entry.kind for entry in await mirror("read_control", "b", "0", 0)] == [ControlKind.HEAD_CHANGED]
    assert (await mirror("read_control", "a", "0", 0))[-1].kind is ControlKind.HEAD_CHANGED


async def test_a_plan_reports_which_groups_moved(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.register("b")
    for number in range(4):
        await scene.queue_up(f"g{number}", f"r{number}")
    since = (await mirror("overview")).last_event_id
    await scene.apply(1, segment("b", 0, "g2", "g0"), segment("a", 0, "g3"), touching=("a", "b"))
    (entry,) = await mirror("read_events", since, 0, 10)
    events = [(event.kind, event.instance, list(event.group_ids)) for event in RequestEvents.FromString(entry.payload).events]
    assert events == [(EventKind.EVENT_KIND_GROUPS_MOVED, "b", ["g2", "g0"])]
    await scene.apply(1, segment("a", 0, "g1"), touching=("a",))
    assert await mirror("read_events", entry.entry_id, 0, 10) == []


async def test_segments_start_anywhere_and_keep_the_order_of_the_rest(scene: Scenario) -> None:
    for number in range(6):
        await scene.queue_up(f"g{number}", f"r{number}")
    await scene.apply(1, segment("a", 2, "g5", "g0"))
    assert await scene.queue_of() == ["g1", "g2", "g5", "g0", "g3", "g4"]
    await scene.apply(1, segment("a", 99, "g1"))
    assert await scene.queue_of() == ["g2", "g5", "g0", "g3", "g4", "g1"]
    await scene.apply(1, segment("a", 1, "g4"), segment("a", 4, "g2"))
    assert await scene.queue_of() == ["g4", "g5", "g0", "g3", "g2", "g1"]


@pytest.mark.parametrize("leaving", [2, 16, 17, 30])
async def test_groups_leave_a_queue_that_none_are_put_on(scene: Scenario, leaving: int) -> None:
    """A few are taken out one by one, many by writing the rest anew."""
    mirror = scene.mirror
    await scene.register("b")
    names = [f"g{number}" for number in range(30)]
    for name in names:
        await scene.queue_up(name, f"r-{name}")
    earlier = len(await mirror("read_control", "a", "0", 0))
    moving = names[1 : leaving + 1]
    applied = await scene.apply(1, segment("b", 0, *moving), touching=("a", "b"))
    assert (applied.applied, applied.moved) == (True, len(moving))
    assert (await scene.queue_of("a"), await scene.queue_of("b")) == ([name for name in names if name not in moving], moving)
    assert len(await mirror("read_control", "a", "0", 0)) == earlier
    await scene.apply(1, segment("b", 0, names[0]), touching=("a", "b"))
    assert [entry.kind for entry in await mirror("read_control", "a", "0", 0)][earlier:] == [ControlKind.HEAD_CHANGED]


async def test_two_queues_exchange_groups_in_one_chunk(scene: Scenario) -> None:
    """The first segment finds those that the second takes away."""
    await scene.register("b")
    for number in range(4):
        await scene.queue_up(f"a{number}", f"r-a{number}")
        await scene.queue_up(f"b{number}", f"r-b{number}", instance="b")
    applied = await scene.apply(1, segment("a", 1, "b0", "b2"), segment("b", 0, "a3", "b3", "a0"), touching=("a", "b"))
    assert (applied.applied, applied.moved) == (True, 4)
    assert await scene.queue_of("a") == ["b0", "b2", "a1", "a2"]
    assert await scene.queue_of("b") == ["a3", "b3", "a0", "b1"]


async def test_the_head_is_reported_only_where_it_changed(scene: Scenario) -> None:
    mirror = scene.mirror
    for number in range(3):
        await scene.queue_up(f"g{number}", f"r{number}")
    earlier = len(await mirror("read_control", "a", "0", 0))
    await scene.apply(1, segment("a", 1, "g2"))
    assert len(await mirror("read_control", "a", "0", 0)) == earlier
    await scene.apply(1, segment("unassigned", 0, "g0", "g1", "g2"), touching=("a", "unassigned"))
    assert [entry.kind for entry in await mirror("read_control", "a", "0", 0)][earlier:] == [ControlKind.HEAD_CHANGED]


async def test_a_plan_that_changes_nothing_keeps_the_version(scene: Scenario) -> None:
    await scene.queue_up("g0", "r0")
    await scene.queue_up("g1", "r1")
    before = await scene.versions("a")
    applied = await scene.apply(3, segment("a", 0, "g0", "g1"))
    assert (applied.applied, applied.moved, applied.versions) == (True, 0, before)


async def test_a_chunk_with_an_old_version_changes_nothing(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("g0", "r0")
    old = await scene.versions("a")
    await scene.queue_up("g1", "r1")  # opens a group: another version
    chunk = PlanChunk(plan_version=1, versions=old, segments=[segment("a", 0, "g1")])
    refused = await mirror("apply_plan", scene.planner, chunk)
    assert (refused.applied, refused.moved, refused.versions) == (False, 0, await scene.versions("a"))
    assert (await mirror("overview")).plan_version == 0
    good = replace(chunk, versions=refused.versions)
    assert (await mirror("apply_plan", scene.planner, good)).applied
    assert not (await mirror("apply_plan", scene.planner, good)).applied  # the repeat after a lost answer
    assert await scene.queue_of() == ["g1", "g0"]


async def test_an_old_plan_version_changes_nothing(scene: Scenario) -> None:
    await scene.queue_up("g0", "r0")
    await scene.queue_up("g1", "r1")
    assert (await scene.apply(5, segment("a", 0, "g1"))).applied
    assert not (await scene.apply(4, segment("a", 0, "g0"))).applied
    assert (await scene.apply(5, segment("a", 0, "g0"))).applied  # the next chunk of the same plan
    assert (await scene.mirror("overview")).plan_version == 5


async def test_a_chunk_must_name_every_queue_it_touches(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.register("b")
    await scene.queue_up("g0", "r0")
    assert not (await scene.apply(1, segment("b", 0, "g0"), touching=("b",))).applied  # g0 is on a
    assert not (await scene.apply(1, segment("b", 0, "g0"), touching=("a",))).applied
    chunk = PlanChunk(plan_version=1, versions={**await scene.versions("a"), "c": 0}, segments=[segment("c", 0, "g0")])
    assert not (await mirror("apply_plan", scene.planner, chunk)).applied  # no such instance
    assert await scene.queue_of("a") == ["g0"]
    assert (await scene.apply(1, segment("b", 0, "g0"), touching=("a", "b"))).applied


async def test_a_plan_leaves_out_groups_that_drained_or_ended(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.queue_up("drained", "r0")
    await scene.pull()
    await scene.queue_up("gone", "r1")
    await scene.queue_up("kept", "r2")
    await mirror("cancel", key_of("r1"), CANCELLED)
    applied = await scene.apply(1, segment("a", 0, "drained", "gone", "never", "kept"))
    assert (applied.applied, applied.moved) == (True, 0)
    assert await scene.queue_of() == ["kept"]


async def test_a_chunk_checks_its_arguments(scene: Scenario) -> None:
    await scene.queue_up("g0", "r0")
    with pytest.raises(ValueError, match=r".*"):
        await scene.apply(1, segment("a", 0, "g0", "g0"))
    with pytest.raises(ValueError, match=r".*"):
        await scene.apply(1, segment("a", 0, "g0"), segment("a", 1, "g0"))
    with pytest.raises(ValueError, match=r".*"):
        await scene.apply(1, segment("a", 0, *(f"g{i}" for i in range(BATCH_MAX + 1))))
