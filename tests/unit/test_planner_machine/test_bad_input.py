"""Input that makes no sense costs itself and nobody else: bodies, instances, profiles, objectives."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from qlm.api.v1 import request_pb2
from qlm_core.profiles.hardware_profile import FIGURE_MAX
from qlm_core.vocabulary.group import GroupKey
from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestKey
from qlm_planner.board.slot import Slot
from qlm_planner.cost.service_times import ROWS, ClassTable
from qlm_planner.machine.effects import Outcome
from qlm_planner.machine.events import ProfilesRead, ReplanRequested
from qlm_planner.shell.plan_message import plan_message
from qlm_queue.values import Acceptance

from .world import CATALOGUE, LEASE_S, World, profiles

NO_SLO = request_pb2.Request(model="alpha", admission=request_pb2.Admission(prompt_tokens=1)).SerializeToString()
NO_NUMBER = request_pb2.Request(
    model="alpha",
    admission=request_pb2.Admission(prompt_tokens=1, slo=request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=math.nan)),
).SerializeToString()


async def accept(world: World, body: bytes) -> RequestKey:
    key = RequestKey("tenant", "bad")
    await world.queue.accept(Acceptance(key=key, body=body, digest=bytes(16), gateway="gateway", slo_class="any", prompt_tokens=1))
    return key


@pytest.mark.parametrize("body", [NO_SLO, NO_NUMBER], ids=["no SLO", "NaN"])
async def test_a_request_that_cannot_be_read_fails_and_stops_no_other(body: bytes) -> None:
    world = World()
    await world.join("a")
    await world.lead()
    with capture_logs() as logs:
        bad = await accept(world, body)
        good = await world.submit("alpha", count=5)
        await world.advance(20.0)
    assert {await world.state(key) for key in good} == {"PLACED"}
    assert await world.state(bad) == "FAILED"
    assert "request_unreadable" in {log["event"] for log in logs}


async def test_an_instance_that_cannot_be_read_serves_nothing() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", count=5)
    await world.advance(LEASE_S + 1.0)
    await world.queue.describe(world.agents["a"][1], b"\xff\xff")
    await world.advance(2.0)
    assert (await world.queues())[UNASSIGNED] == ["alpha"]
    assert machine.board.slots["a"].facts.models == ()
    await world.join("b")
    await world.advance(2.0)
    assert (await world.queues())["b"] == ["alpha"]


async def test_without_instances_all_waits_and_every_question_is_answered() -> None:
    world = World()
    machine = await world.lead()
    keys = await world.submit("alpha", slo_s=2.0, count=20) + await world.submit("beta", priority=1)
    await world.deliver(ReplanRequested(number=1))
    await world.advance(10.0)
    assert {await world.state(key) for key in keys} == {"PLACED"}
    assert set((await world.queues())[UNASSIGNED]) == {"alpha", "beta"}
    assert any(change.replans == {1: 0} for change in world.changes)
    [queue] = plan_message(machine.board, machine.changes.table, world.now_s).queues
    assert [(group.waiting, group.completion_p50_s) for group in queue.groups] == [(20, 0.0), (1, 0.0)]


@pytest.mark.parametrize("slo_s", [math.inf, 1e-3, 1e12], ids=["no end", "all late", "a lifetime"])
async def test_objectives_of_any_size_are_ordered(slo_s: float) -> None:
    """They find a place beside others, the plan has numbers, and who has an urgent one does not wait for who has no end."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    for model in ("alpha", "beta", "alpha", "gamma"):
        await world.submit(model, slo_s=slo_s, count=200)
        await world.settle()
    [urgent] = await world.submit("beta", slo_s=60.0)
    await world.advance(3.0)
    await world.deliver(ReplanRequested(number=1))
    await world.advance(3.0)
    assert await world.state(urgent) == "PLACED"
    assert math.isfinite(machine.changes.predicted.total)
    assert all(job.outcome is not Outcome.FAILED for job in world.jobs)
    queues = plan_message(machine.board, machine.changes.table, world.now_s).queues
    outlooks = [group for queue in queues if queue.instance == "a" for group in queue.groups]
    assert sum(group.waiting for group in outlooks) == 801
    assert all(math.isfinite(group.completion_p90_s) for group in outlooks)
    if slo_s > 60.0:
        assert machine.changes.predicted.late < 0.5
        assert outlooks[0].first_deadline_s < math.inf or outlooks[1].first_deadline_s < math.inf


async def test_figures_that_are_no_numbers_stop_no_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes NaN of what groups take: the solver has no problem to solve, which is said and costs less and less, requests find
    groups all the same, and there are plans again when there are numbers."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    sound = ClassTable._shared

    def broken(self: ClassTable, slot: Slot, key: GroupKey, size: int) -> NDArray[np.float64]:
        row: NDArray[np.float64] = sound(self, slot, key, size) * np.r_[np.nan, np.ones(ROWS - 1)]
        return row

    monkeypatch.setattr(ClassTable, "_shared", broken)
    keys = []
    for number in range(12):
        keys += await world.submit(("alpha", "beta", "gamma")[number % 3], slo_s=60.0 + 600.0 * number, count=5)
        await world.settle()
    await world.deliver(ReplanRequested(number=1))
    await world.advance(15.0)
    assert {await world.state(key) for key in keys} == {"PLACED"}
    assert any(1 in change.replans for change in world.changes), "who asks is answered"
    failed = [job for job in world.jobs if job.outcome is Outcome.FAILED]
    assert 1 <= len(failed) <= 12
    assert all("no number" in job.reason for job in failed)
    assert not world.solves
    monkeypatch.setattr(ClassTable, "_shared", sound)
    await world.deliver(ProfilesRead(catalogue=CATALOGUE, profiles=profiles(version=2)))
    await world.advance(15.0)
    await world.deliver(ReplanRequested(number=2))
    await world.advance(1.0)
    assert world.solves
    assert world.jobs[-1].outcome is not Outcome.FAILED
    assert math.isfinite(machine.changes.predicted.late)


async def test_the_slowest_engine_that_a_profile_may_describe_is_planned_with() -> None:
    """And one for which everything takes no time at all beside it."""
    sound = profiles()
    rows = (
        replace(row, decode_a_ms=FIGURE_MAX, prefill_ms_per_token=FIGURE_MAX, load_disk_to_cpu_s=FIGURE_MAX)
        if row.gpu == "big"
        else replace(row, decode_b_ms_per_seq=0.0, prefill_base_ms=0.0)
        for row in sound.hardware
    )
    world = World(snapshot=replace(sound, hardware=tuple(rows)))
    await world.join("a", "big")
    await world.join("b", "small")
    machine = await world.lead()
    for number in range(12):
        await world.submit(("alpha", "beta", "gamma")[number % 3], slo_s=60.0 + 600.0 * number, count=5)
        await world.settle()
    await world.deliver(ReplanRequested(number=1))
    await world.advance(5.0)
    assert all(job.outcome is not Outcome.FAILED for job in world.jobs)
    assert math.isfinite(machine.changes.predicted.total)
    assert (await world.queues())["a"] == []
    assert sum(group.waiting for group in machine.board.queue_groups("b")) == 60
