"""Metrics and settings."""

from __future__ import annotations

import math

import pytest

from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.request import SloKind
from qlm_planner.config import PlannerConfig
from qlm_planner.machine.effects import ApplyChunk, Place
from qlm_planner.machine.events import ArrivalsRead, ChunkAnswered, ExpirySwept, PlaceAnswered, Reclaimed
from qlm_planner.policy import Policy
from qlm_planner.shell.metrics import PlannerMetrics
from qlm_process.config import load_config

from .world import World


async def test_metrics_count_what_happens() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", count=3)
    await world.settle()
    metrics = PlannerMetrics()
    chunk = ApplyChunk(plan_version=1, versions={}, segments=())
    metrics.count(ArrivalsRead(arrivals=()))
    metrics.count(PlaceAnswered(call=Place(groups=(), requests=()), done=(True, True, False)))
    metrics.count(Reclaimed(incarnation="a/1", count=7))
    metrics.count(ExpirySwept(count=2))
    metrics.count(ChunkAnswered(call=chunk, applied=True, versions={}, moved=4))
    metrics.count(ChunkAnswered(call=chunk, applied=False, versions={}, moved=0))
    metrics.show(machine)
    value = metrics.registry.get_sample_value
    assert value("qlm_planner_placed_total") == 2
    assert value("qlm_planner_stale_total") == 1
    assert value("qlm_planner_reclaims_total") == 7
    assert value("qlm_planner_expired_total") == 2
    assert value("qlm_planner_groups_moved_total") == 4
    assert value("qlm_planner_conflicts_total") == 1
    assert value("qlm_planner_groups") == 1
    metrics.standby()
    assert value("qlm_planner_groups") == 0


def test_settings_reach_the_policy() -> None:
    overrides: dict[str, object] = {
        "models": "[{name: m, profile: p}]",
        "planner.delta": "2",
        "planner.slo_band": "-1",
        "queue.lease_ttl_s": "5",
    }
    config = load_config(PlannerConfig, None, overrides=overrides, environment={})
    assert config.policy().delta == 2.0
    assert config.policy().lease_ttl_s == 5.0
    assert config.policy().slo_band == -1
    assert config.catalogue()["m"].profile == "p"


@pytest.mark.parametrize(
    ("setting", "value"),
    [("planner.delta", "0"), ("planner.late_weight", "nan"), ("planner.speed", "1"), ("models", "[]")],
)
def test_wrong_settings_are_named(setting: str, value: str) -> None:
    overrides: dict[str, object] = {"models": "[{name: m, profile: p}]", setting: value}
    with pytest.raises(ConfigError, match=setting.rpartition(".")[2]):
        load_config(PlannerConfig, None, overrides=overrides, environment={})


@pytest.mark.parametrize("wrong", [{"delta": 0.0}, {"late_weight": float("inf")}, {"work_weight": -1.0}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Policy(**wrong)  # type: ignore[arg-type]


# The mix of SLO kinds in one queue, and SLOs at the limits ------------------------------------------------------------


async def test_a_mix_of_kinds_in_one_queue() -> None:
    """Bands first; inside the band of SLOs by deadline, whatever the deadline bounds; kinds never share a group."""
    world = World()
    await world.join("a")
    machine = await world.lead()
    await world.submit("alpha", priority=1)
    await world.submit("alpha", 300.0)
    await world.submit("alpha", 100.0, kind=SloKind.FIRST_TOKEN)
    await world.submit("alpha", priority=-1)
    await world.submit("alpha", 30.0)
    await world.submit("alpha", 900.0, kind=SloKind.FIRST_TOKEN)
    await world.submit("alpha", 900.0)
    await world.settle()
    order = [(group.band, group.traits.key.slo_kind, group.traits.slo_s) for group in machine.board.queue_groups("a")]
    priority, first, whole = SloKind.PRIORITY, SloKind.FIRST_TOKEN, SloKind.COMPLETION
    assert order[:4] == [(-1, priority, math.inf), (0, whole, 30.0), (0, first, 100.0), (0, whole, 300.0)]
    assert {each[1] for each in order[4:6]} == {first, whole}
    assert order[6] == (1, priority, math.inf)
    assert await world.group_ids("a") == machine.board.queues["a"]


async def test_tiny_slos_do_not_open_a_group_each() -> None:
    world = World()
    await world.join("a")
    machine = await world.lead()
    for _ in range(100):
        await world.submit("alpha", 0.001, prompt_tokens=1)
        world.now_s += 0.001
        await world.settle()
    assert len(machine.board.groups) < 15
