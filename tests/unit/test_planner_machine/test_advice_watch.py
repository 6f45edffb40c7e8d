"""Advice beside the decisions: reported when it changes, forgotten when there is nothing to say, and no nonsense ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from drawn_problems import by_hand, question_by_hand
from qlm_planner.overload.advice import Advice, AdviceFailedError, Option, advise, forecast
from qlm_planner.overload.advice_question import Miss, Question
from qlm_planner.search import Problem
from qlm_planner.shell.advice_watch import AdviceWatch
from qlm_planner.shell.metrics import PlannerMetrics
from qlm_planner.shell.rpc import advice_to_proto

from .test_advice import build_question, cluster

DEADLINE_S = 30.0


async def at_once(question: Question) -> Advice:
    return advise(question)


async def watched(
    answers: list[Question | Exception | None], until: Callable[[AdviceWatch, int], bool]
) -> tuple[AdviceWatch, PlannerMetrics]:
    """A watch that runs until `until`, by it and its number of asks."""
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
    busy = await build_question(await cluster("a"), {("alpha", 30.0): 150.0})
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
        sent, own = getattr(message, field.name), getattr(value, field.name)
        if isinstance(own, tuple):
            assert len(sent) == len(own), field.name
            for each, of_own in zip(sent, own, strict=True):
                if dataclasses.is_dataclass(of_own):
                    same(each, of_own)
                else:
                    assert each == of_own, field.name
        else:
            assert sent == own, field.name


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


async def test_spare_instances_and_attainment_are_metrics() -> None:
    idle = await build_question(await cluster("a", "b", "c"), {("alpha", 600.0): 1.0})
    watch, metrics = await watched([idle], lambda watch, asks: watch.latest is not None)
    assert watch.latest is not None
    assert metrics.registry.get_sample_value("qlm_planner_spare_instances") == len(watch.latest.spare) == 2
    metrics.show_advice(dataclasses.replace(watch.latest, attainment=0.75))
    assert metrics.registry.get_sample_value("qlm_planner_forecast_attainment") == 0.75


async def test_the_better_of_two_options_of_one_gpu_is_a_metric() -> None:
    """Instances of it have different models."""
    advice = advise(await build_question(await cluster("a"), {("alpha", 30.0): 150.0}))
    best = advice.options[0]
    metrics = PlannerMetrics()
    metrics.show_advice(
        dataclasses.replace(advice, options=(best, dataclasses.replace(best, models=("beta",), instances=64, enough=False)))
    )
    assert metrics.registry.get_sample_value("qlm_planner_advised_instances", {"gpu": best.gpu, "n_gpu": "1"}) == best.instances


async def test_a_log_line_says_it_when_it_changes() -> None:
    busy = await build_question(await cluster("a"), {("alpha", 30.0): 150.0})
    with capture_logs() as logs:
        watch, _ = await watched([busy, busy, busy, None, busy], lambda watch, asks: asks > 5)
    assert watch.latest is not None
    said = [log["advice"] for log in logs if log["event"] == "planner_advice"]
    assert said == 2 * [watch.latest.line]


async def test_nonsense_costs_advice_and_nothing_else() -> None:
    watch, metrics = await watched([ValueError("NaN"), AdviceFailedError("it died"), None], lambda watch, asks: asks > 4)
    assert watch.latest is None
    assert metrics.registry.get_sample_value("qlm_planner_forecast_attainment") == 1.0


async def test_advice_is_taken_back_when_all_is_well() -> None:
    busy = await build_question(await cluster("a"), {("alpha", 30.0): 150.0})
    watch, metrics = await watched([busy, None], lambda watch, asks: asks > 2)
    assert watch.latest is None
    assert metrics.registry.get_sample_value("qlm_planner_advised_instances", {"gpu": "big", "n_gpu": "1"}) is None


@pytest.mark.parametrize("count", [0, 5])
async def test_a_cluster_with_work_and_no_misses_is_left_alone(count: int) -> None:
    world = await cluster("a")
    await world.submit("alpha", slo_s=600.0, count=count)
    await world.settle()
    calm = dataclasses.replace(await build_question(world, {("alpha", 600.0): 1.0}), idle=0)
    assert calm.needs_advice == (count > 0)
    watch, _ = await watched([calm], lambda watch, asks: asks > 3)
    assert watch.latest is None


# Advice on problems made by hand: whole seconds, and answers that a pencil gives. Every group has ten requests --------


ALPHA, BETA = 0, 1


def advised(problem: Problem, size: int, *, n_gpu: tuple[int, ...] = (1, 1), unserved: int = 0) -> Advice:
    return advise(question_by_hand(problem, size, n_gpu=n_gpu, unserved=unserved))


def able(problem: Problem, *kinds: Sequence[int]) -> Problem:
    """Kinds of instances that can serve these models alone."""
    cold_s = np.array([[problem.cold_s[0, model] if model in kind else math.inf for model in range(problem.models)] for kind in kinds])
    return replace(problem, cold_s=cold_s, warm_s=cold_s)


def test_the_fewest_that_are_enough() -> None:
    """Ten groups of 30 s that are due after 61 s: two on each of five instances, the first of which is there."""
    problem = by_hand(model=[ALPHA] * 10, work_s=[[30.0] * 10], deadline_s=[61.0] * 10, kind=[0, 0], active=[ALPHA, -1], swap_s=0.0)
    advice = advised(problem, 1)
    [option] = advice.options
    assert (option.gpu, option.instances, option.enough, option.attainment) == ("big", 4, True, 1.0)
    assert advice.attainment == pytest.approx(0.2)
    assert advice.line == "add 4 more big: 20% in time now, 100% then, alpha most"


@pytest.mark.parametrize(("deadline_s", "instances"), [(29.0, 0), (49.0, 2), (61.0, 1)])
def test_an_instance_that_is_added_loads_its_model_first(deadline_s: float, instances: int) -> None:
    """Three groups of 30 s, one of which starts at once, or after 20 s on an instance that is added. 29 s are too short for these."""
    problem = by_hand(model=[ALPHA] * 3, work_s=[[30.0] * 3], deadline_s=[deadline_s] * 3, kind=[0, 0], active=[ALPHA, -1], swap_s=20.0)
    assert sum(option.instances for option in advised(problem, 1).options if option.enough) == instances


def test_the_kind_with_fewer_gpus_in_all_is_first() -> None:
    """Six groups that are due after 61 s: two instances of two GPUs each, or three of one GPU each."""
    problem = by_hand(model=[ALPHA] * 6, work_s=[[20.0] * 6, [30.0] * 6], deadline_s=[61.0] * 6, kind=[0, 1], active=[-1, -1], swap_s=0.0)
    advice = advised(problem, 0, n_gpu=(2, 1))
    assert [(option.gpu, option.instances) for option in advice.options] == [("other", 3), ("big", 2)]
    assert advice.line.startswith("add 3 more other:")


def test_the_model_that_is_late_most_is_named() -> None:
    problem = by_hand(
        model=[ALPHA, BETA, BETA], work_s=[[10.0, 50.0, 50.0]], deadline_s=[1e3, 61.0, 61.0], kind=[0, 0], active=[BETA, -1], swap_s=5.0
    )
    assert advised(problem, 1).model == "beta"


def test_requests_that_run_longer_than_their_slo_are_late_however_early_the_orders_start_them() -> None:
    """They are due after 200 s, but come 60 s before. An empty instance runs one in 30 s, a full one in 90 s: a load of half makes it 45 s,
    one of 0.9 makes it 75 s."""
    problem = replace(
        by_hand(model=[ALPHA], work_s=[[150.0]], deadline_s=[500.0], kind=[0], active=[ALPHA]),
        slo_s=np.array([60.0]),
        own_s=np.array([[90.0]]),
    )
    question = replace(question_by_hand(problem, 1), alone_s=np.array([[30.0]]))
    assert forecast(question, [0]).attainment == 1.0
    assert forecast(replace(question, problem=replace(problem, work_s=np.array([[270.0]]))), [0]).attainment == 0.0


def test_the_least_used_go_first_and_no_more_than_the_load_lets_go() -> None:
    """Two of four have the model, and each serves one group in time; the others would have to load it."""
    problem = by_hand(
        model=[ALPHA, ALPHA, BETA],
        work_s=[[60.0, 60.0, 0.0]],
        deadline_s=[61.0, 61.0, 1e3],
        kind=[0] * 5,
        active=[BETA, ALPHA, BETA, ALPHA, -1],
    )
    assert advised(problem, 4).spare == ("a", "c")


def test_the_last_instance_does_not_go() -> None:
    """Not even where no request has a deadline."""
    problem = by_hand(model=[ALPHA], work_s=[[50.0]], deadline_s=[math.inf], kind=[0] * 4, active=[ALPHA] * 3 + [-1])
    assert len(advised(problem, 3).spare) == 2


def test_a_model_that_nobody_serves_is_advised_for_however_few_want_it() -> None:
    """The SLOs are met but for one group in a thousand, which another instance of those that are there does not help."""
    many = by_hand(
        model=[ALPHA] * 999 + [BETA], work_s=[[1.0] * 1000] * 2, deadline_s=[1e5] * 1000, kind=[0, 0, 1], active=[ALPHA, -1, -1], swap_s=5.0
    )
    advice = advised(able(many, [ALPHA], [ALPHA, BETA]), 1, unserved=10)
    assert advice.attainment >= 0.99
    assert [(option.gpu, option.instances) for option in advice.options] == [("other", 1)]
    assert advice.line.startswith("add 1 more other:")


@pytest.mark.parametrize("fleet", [[0, 0, 1], [0, 1, 1]])
def test_the_only_one_that_serves_a_model_does_not_go(fleet: list[int]) -> None:
    """However seldom it is requested, or not at all."""
    problem = by_hand(
        model=[ALPHA] * 2, work_s=[[1.0] * 2] * 2, deadline_s=[1e5] * 2, kind=[*fleet, 0], active=[-1] * 4, swap_s=5.0, models=2
    )
    [gone] = advised(able(problem, [ALPHA], [BETA]), 3).spare
    assert fleet.count(fleet[ord(gone) - ord("a")]) == 2
