"""Advice beside the decisions: told when it changes, forgotten when there is nothing to say, and no nonsense ends it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from qlm_planner.overload.advice import Advice, AdviceFailedError, Option, advise
from qlm_planner.overload.advice_question import Miss, Question
from qlm_planner.shell.advice_watch import AdviceWatch
from qlm_planner.shell.metrics import PlannerMetrics
from qlm_planner.shell.rpc import advice_to_proto

from .test_advice import asked, cluster

DEADLINE_S = 30.0


async def at_once(question: Question) -> Advice:
    return advise(question)


async def watched(
    answers: list[Question | Exception | None], until: Callable[[AdviceWatch, int], bool]
) -> tuple[AdviceWatch, PlannerMetrics]:
    """A watch that is asked until `until`, by it and how often it asked."""
    asks = 0

    def ask() -> Question | None:
        nonlocal asks
        answer = answers[min(asks, len(answers) - 1)]
        asks += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    metrics = PlannerMetrics()
    watch = AdviceWatch(ask, at_once, asyncio.Lock(), 0.001, metrics.show_advice)
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(DEADLINE_S):
        while not until(watch, asks):
            assert not task.done(), "it goes on whatever comes"
            await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.wait([task])
    return watch, metrics


async def test_advice_is_shown_and_on_the_wire() -> None:
    busy = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    watch, metrics = await watched([busy], lambda watch, asks: watch.latest is not None)
    advice = watch.latest
    assert isinstance(advice, Advice)
    shown = metrics.registry.get_sample_value("qlm_planner_advised_instances", {"gpu": "big", "n_gpu": "1"})
    assert shown == advice.options[0].instances
    message = advice_to_proto(advice)
    assert message.line == advice.line
    assert [option.instances for option in message.options] == [option.instances for option in advice.options]


def same(message: object, value: object) -> None:
    """Every field of a value is on the wire, under its name."""
    assert dataclasses.is_dataclass(value)
    for field in dataclasses.fields(value):
        told, own = getattr(message, field.name), getattr(value, field.name)
        if isinstance(own, tuple):
            assert len(told) == len(own), field.name
            for each, of_own in zip(told, own, strict=True):
                if dataclasses.is_dataclass(of_own):
                    same(each, of_own)
                else:
                    assert each == of_own, field.name
        else:
            assert told == own, field.name


def test_nothing_of_it_is_lost_on_the_wire() -> None:
    miss = Miss(group_id="g1-2", model="alpha", slo_class="64s", instance="a", waiting=9, late=4.5, over_s=3.25)
    option = Option(gpu="big", n_gpu=2, models=("alpha", "beta"), instances=3, attainment=0.875, enough=True)
    advice = Advice(
        made_s=7.0,
        attainment=0.5,
        late=12.5,
        unserved=8,
        misses=(miss, dataclasses.replace(miss, group_id="g1-3")),
        options=(option, dataclasses.replace(option, gpu="small", enough=False)),
        model="alpha",
        spare=("x", "y"),
    )
    same(advice_to_proto(advice), advice)


async def test_what_could_go_and_what_is_met_are_metrics() -> None:
    idle = await asked(await cluster("a", "b", "c"), {("alpha", 600.0): 1.0})
    watch, metrics = await watched([idle], lambda watch, asks: watch.latest is not None)
    assert watch.latest is not None
    assert metrics.registry.get_sample_value("qlm_planner_spare_instances") == len(watch.latest.spare) == 2
    metrics.show_advice(dataclasses.replace(watch.latest, attainment=0.75))
    assert metrics.registry.get_sample_value("qlm_planner_forecast_attainment") == 0.75


async def test_of_two_options_of_one_gpu_the_better_one_is_a_metric() -> None:
    """Instances of it have different models."""
    advice = advise(await asked(await cluster("a"), {("alpha", 30.0): 150.0}))
    best = advice.options[0]
    metrics = PlannerMetrics()
    metrics.show_advice(
        dataclasses.replace(advice, options=(best, dataclasses.replace(best, models=("beta",), instances=64, enough=False)))
    )
    assert metrics.registry.get_sample_value("qlm_planner_advised_instances", {"gpu": best.gpu, "n_gpu": "1"}) == best.instances


async def test_a_log_line_says_it_when_it_changes() -> None:
    busy = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    with capture_logs() as logs:
        watch, _ = await watched([busy, busy, busy, None, busy], lambda watch, asks: asks > 5)
    assert watch.latest is not None
    said = [log["advice"] for log in logs if log["event"] == "planner_advice"]
    assert said == 2 * [watch.latest.line]


async def test_nonsense_costs_advice_and_nothing_else() -> None:
    watch, metrics = await watched([ValueError("NaN"), AdviceFailedError("it died"), None], lambda watch, asks: asks > 4)
    assert watch.latest is None
    assert metrics.registry.get_sample_value("qlm_planner_forecast_attainment") == 1.0


async def test_what_was_said_is_taken_back_when_all_is_well() -> None:
    busy = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    watch, metrics = await watched([busy, None], lambda watch, asks: asks > 2)
    assert watch.latest is None
    assert metrics.registry.get_sample_value("qlm_planner_advised_instances", {"gpu": "big", "n_gpu": "1"}) is None


@pytest.mark.parametrize("count", [0, 5])
async def test_a_cluster_with_work_and_no_misses_is_left_alone(count: int) -> None:
    world = await cluster("a")
    await world.submit("alpha", slo_s=600.0, count=count)
    await world.settle()
    calm = dataclasses.replace(await asked(world, {("alpha", 600.0): 1.0}), idle=0)
    assert calm.needs_advice == (count > 0)
    watch, _ = await watched([calm], lambda watch, asks: asks > 3)
    assert watch.latest is None
