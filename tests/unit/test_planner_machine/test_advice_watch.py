"""Advice beside the decisions: told when it changes, forgotten when there is nothing to say, and no nonsense ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from qlm_planner.advice.advising import Advice, advise
from qlm_planner.advice.question import Question
from qlm_planner.advice.watch import AdviceWatch
from qlm_planner.advice.wire import to_proto
from qlm_planner.metrics import PlannerMetrics

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
    watch = AdviceWatch(ask, at_once, asyncio.Lock(), 0.001, metrics, asyncio.Event())
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(DEADLINE_S):
        while not until(watch, asks):
            assert not task.done(), "it goes on whatever comes"
            await asyncio.sleep(0.002)
    task.cancel()
    await asyncio.wait([task])
    return watch, metrics


async def test_advice_is_shown_and_on_the_wire() -> None:
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    busy = Question(**{name: getattr(question, name) for name in question.__slots__} | {"late": 50.0})
    watch, metrics = await watched([busy], lambda watch, asks: watch.latest is not None)
    advice = watch.latest
    assert isinstance(advice, Advice)
    shown = metrics.registry.get_sample_value("qlm_planner_advised_instances", {"gpu": "big", "n_gpu": "1"})
    assert shown == advice.options[0].instances
    message = to_proto(advice)
    assert message.line == advice.line
    assert [option.instances for option in message.options] == [option.instances for option in advice.options]


async def test_nonsense_costs_advice_and_nothing_else() -> None:
    watch, metrics = await watched([ValueError("NaN"), ZeroDivisionError(), None], lambda watch, asks: asks > 4)
    assert watch.latest is None
    assert metrics.registry.get_sample_value("qlm_planner_forecast_attainment") == 1.0


async def test_what_was_said_is_taken_back_when_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlm_planner.advice.watch.PAUSE_SHARE", 0.0)
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    busy = Question(**{name: getattr(question, name) for name in question.__slots__} | {"late": 50.0})
    watch, metrics = await watched([busy, None], lambda watch, asks: asks > 2)
    assert watch.latest is None
    assert metrics.registry.get_sample_value("qlm_planner_advised_instances", {"gpu": "big", "n_gpu": "1"}) is None


async def test_who_watches_the_plan_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """When there is advice, and when there is none any more: also while no group comes or goes. Not while nothing is said."""
    monkeypatch.setattr("qlm_planner.advice.watch.PAUSE_SHARE", 0.0)
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    busy = Question(**{name: getattr(question, name) for name in question.__slots__} | {"late": 50.0})
    now: Question | None = None
    asks = 0

    def ask() -> Question | None:
        nonlocal asks
        asks += 1
        return now

    changed = asyncio.Event()
    watch = AdviceWatch(ask, at_once, asyncio.Lock(), 0.001, PlannerMetrics(), changed)
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(DEADLINE_S):
        while asks < 3:
            await asyncio.sleep(0.002)
        assert not changed.is_set()
        for now in (busy, None):
            while (watch.latest is None) != (now is None):
                await changed.wait()
                changed.clear()
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("late", [0.0, 0.4])
async def test_a_cluster_with_work_and_no_misses_is_left_alone(late: float) -> None:
    question = await asked(await cluster("a"), {("alpha", 600.0): 1.0})
    calm = Question(**{name: getattr(question, name) for name in question.__slots__} | {"late": late, "idle": 0})
    watch, _ = await watched([calm], lambda watch, asks: asks > 3)
    assert watch.latest is None
