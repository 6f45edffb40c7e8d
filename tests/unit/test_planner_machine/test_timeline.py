"""The objective: times as `qlm_core.prediction` has them, cost as the design states it."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from qlm_planner.timeline import RELATIVE_DEVIATION, Cost, timelines

from predicted_times import group_times
from qlm_core.assessment import Assessment
from qlm_core.calibration import CalibratedTime, CalibrationProfile, CalibrationTable
from qlm_core.distribution import Normal
from qlm_core.instance import InstanceFacts
from qlm_core.prediction import GroupView, QueueView
from qlm_core.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.estimates import Estimates
from qlm_planner.group_meta import band_of, traits_of
from qlm_planner.insertion import Line
from qlm_planner.items import Group, Slot
from qlm_planner.policy import Policy

from .world import CATALOGUE, MODELS, START_S, profiles

SNAPSHOT = profiles()
FACTS = InstanceFacts(name="a", incarnation="a/1", gpu="big", n_gpu=1, engine="simulated", models=MODELS)


def estimates(policy: Policy | None = None) -> Estimates:
    made = Estimates(policy or Policy())
    made.load(CATALOGUE, SNAPSHOT)
    return made


def group(number: int, model: str, count: int, slo_s: float = 60.0, kind: SloKind = SloKind.COMPLETION, prompt_tokens: int = 200) -> Group:
    facts = RequestFacts(
        queue_id=f"{number}-0",
        key=RequestKey("t", str(number)),
        acceptance_number=number,
        accepted_s=START_S,
        model=model,
        slo=Slo(kind=kind, seconds=slo_s),
        prompt_tokens=prompt_tokens,
        output_tokens_max=256,
    )
    traits = traits_of(facts)
    return Group(
        group_id=f"g1-{number}",
        order=(1, number),
        traits=traits,
        band=band_of(traits, 0),
        instance="a",
        first_deadline_s=facts.deadline_s,
        next_deadline_s=facts.deadline_s,
        last_deadline_s=facts.deadline_s,
        waiting=count,
        live=count,
        waiting_prompt_tokens=count * prompt_tokens,
    )


def line(groups: Sequence[Group], *, active: str = "", running: int = 0, warm: Sequence[str] = ()) -> Line:
    slot = Slot(facts=FACTS, running=running, active_model=active, warm_models=tuple(warm))
    return Line.of(slot, groups, estimates())


def views(groups: Sequence[Group], *, active: str, running: int, warm: Sequence[str]) -> QueueView:
    return QueueView(
        instance=FACTS,
        active_model=active,
        running=running,
        warm_models=tuple(warm),
        groups=tuple(
            GroupView(
                group_id=each.group_id,
                model=each.traits.key.model,
                slo_class=each.traits.key.slo_class,
                token_class=each.traits.key.token_class,
                waiting=each.waiting,
                waiting_prompt_tokens=each.waiting_prompt_tokens,
                first_deadline_s=each.first_deadline_s,
            )
            for each in groups
        ),
    )


@pytest.mark.parametrize("running", [0, 100])
@pytest.mark.parametrize("active", ["", "alpha", "beta"])
@pytest.mark.parametrize("warm", [(), ("beta", "gamma")])
@pytest.mark.parametrize("counts", [(400, 300, 800, 200), (200, 1000, 500, 500), (20, 30, 5, 60)])
def test_planner_and_estimator_say_the_same(running: int, active: str, warm: Sequence[str], counts: Sequence[int]) -> None:
    """Both put the one model of a queue to work: starts are those of `group_times` to within a hundredth of the queue's length (terms share
    a service with prompts up to an eighth longer or shorter), and so are the ends of runs. A group inside a run is taken to decode beside
    its own group, not beside those that join behind."""
    if not active:
        running = 0
    models = ("alpha", "alpha", "beta", "alpha")
    groups = [group(number, model, count) for number, (model, count) in enumerate(zip(models, counts, strict=True))]
    expected = group_times(views(groups, active=active, running=running, warm=warm), CATALOGUE, SNAPSHOT)
    found = line(groups, active=active, running=running, warm=warm).timeline(START_S)
    length_s = expected[-1].completion.mean
    assert found.start_s == pytest.approx([time.wait.mean for time in expected], abs=0.01 * length_s)
    assert found.end_s == pytest.approx([time.completion.mean for time in expected], abs=0.07 * length_s)
    assert found.end_s[1:] == pytest.approx([time.completion.mean for time in expected[1:]], abs=0.03 * length_s)


def test_they_agree_where_classes_are_mixed() -> None:
    """The estimator lets all classes share one batch, the planner gives each group the batch of its own class."""
    groups = [group(number, "alpha", 300, prompt_tokens=tokens) for number, tokens in enumerate((50, 400, 200, 900, 100))]
    expected = group_times(views(groups, active="alpha", running=50, warm=()), CATALOGUE, SNAPSHOT)
    found = line(groups, active="alpha", running=50).timeline(START_S)
    assert found.start_s == pytest.approx([time.wait.mean for time in expected], abs=0.1 * expected[-1].completion.mean)


def test_an_order_is_judged_as_given() -> None:
    """What clients' predictions were off by holds who was let by later, so the ends of an order do not go by it: they spread by a share of
    themselves."""
    rows = (CalibrationProfile(time=CalibratedTime.COMPLETION, model="alpha", bias_factor=1.5, relative_variance=0.04),)
    made = Estimates(Policy())
    made.load(CATALOGUE, dataclasses.replace(SNAPSHOT, calibration=CalibrationTable(rows)))
    groups = [group(1, "alpha", 1000, 30.0), group(2, "beta", 100, 60.0)]
    own = line(groups, active="alpha").timeline(START_S)
    told = Line.of(Slot(facts=FACTS, active_model="alpha"), groups, made).timeline(START_S)
    assert told.end_s == pytest.approx(own.end_s)
    assert told.end_variance == pytest.approx(own.end_variance)
    assert (own.end_variance > np.square(0.03 * own.end_s)).all()


@pytest.mark.parametrize("seed", range(5))
def test_many_orders_are_each_as_alone(seed: int) -> None:
    chance = random.Random(seed)
    lines = []
    for number in range(6):
        models = [chance.choice(MODELS) for _ in range(chance.randrange(0, 8))]
        groups = [group(10 * number + at, model, chance.randrange(1, 400)) for at, model in enumerate(models)]
        lines.append(line(groups, active=chance.choice(("", *MODELS)), running=chance.randrange(0, 100)))
    for each, made in zip(lines, timelines([(each.engine, each.columns) for each in lines], START_S), strict=True):
        alone = each.timeline(START_S)
        assert made.start_s == pytest.approx(alone.start_s, abs=1e-6)
        assert made.end_s == pytest.approx(alone.end_s, abs=1e-6)
        assert made.end_variance == pytest.approx(alone.end_variance, abs=1e-6)
        assert dataclasses.astuple(made.cost) == pytest.approx(dataclasses.astuple(alone.cost), abs=1e-6)


def test_a_swap_costs_its_time_unless_the_model_is_active_or_warm() -> None:
    only = [group(1, "alpha", 10)]
    cold, warm, active = line(only, active="beta"), line(only, active="beta", warm=["alpha"]), line(only, active="alpha")
    assert [each.timeline(START_S).cost.swap_s for each in (cold, warm, active)] == pytest.approx([10.0, 2.0, 0.0])
    assert [each.timeline(START_S).cost.swaps for each in (cold, warm, active)] == [1, 1, 0]


def test_the_first_load_of_an_empty_engine_takes_time_and_costs_nothing() -> None:
    found = line([group(1, "alpha", 10), group(2, "beta", 10)]).timeline(START_S)
    assert found.start_s[0] >= 10.0
    loaded = line([group(1, "alpha", 10), group(2, "beta", 10)], active="alpha").timeline(START_S)
    assert found.cost.swap_s == pytest.approx(loaded.cost.swap_s)
    assert loaded.cost.swap_s > 0.0


def test_loading_from_disk_hides_behind_the_run_before() -> None:
    """The next model comes to host memory while the one before is served: only the last part of the swap is waited for."""
    cost = line([group(1, "alpha", 2000, 3600.0), group(2, "beta", 10, 3600.0)], active="alpha").timeline(START_S).cost
    assert cost.swap_s == pytest.approx(2.0)


def test_late_requests_are_counted_each_with_its_place() -> None:
    """Equation for a normal: all late, none late, and a part of a group that is served across its deadline."""
    assert line([group(1, "alpha", 100, 600.0)], active="alpha").timeline(START_S).cost.late == pytest.approx(0.0, abs=1e-3)
    assert line([group(1, "alpha", 100, 0.5)], active="alpha").timeline(START_S).cost.late == pytest.approx(100.0, abs=1e-3)
    across = line([group(1, "alpha", 4000, 45.0)], active="alpha").timeline(START_S)
    assert 1000 < across.cost.late < 3000
    assert across.cost.tardiness_s > 1000


@pytest.mark.parametrize(("active", "running"), [("alpha", 0), ("beta", 0), ("beta", 1)])
@pytest.mark.parametrize("share", [0.85, 1.0, 1.1])
def test_one_request_is_late_as_often_as_its_times_say(active: str, running: int, share: float) -> None:
    """Against draws of what is before it, of its own output, and of what the formulas leave out: one that runs, or goes behind a swap and
    one that runs."""
    only = [group(1, "alpha", 1)]
    (time,) = group_times(views(only, active=active, running=running, warm=["alpha"]), CATALOGUE, SNAPSHOT)
    slo_s = share * time.completion.mean
    found = line([group(1, "alpha", 1, slo_s)], active=active, running=running, warm=["alpha"]).timeline(START_S)
    dice = np.random.default_rng(3)
    ends_s = dice.normal(time.wait.mean, time.wait.deviation, 200_000) + time.prefill_s
    ends_s += dice.normal(time.decode.mean, time.decode.deviation, ends_s.size)
    ends_s *= dice.normal(1.0, RELATIVE_DEVIATION, ends_s.size)
    assert found.cost.late == pytest.approx(float((ends_s > slo_s).mean()), abs=0.04)
    assert found.cost.tardiness_s == pytest.approx(float(np.maximum(ends_s - slo_s, 0.0).mean()), abs=0.02)
    assert math.sqrt(found.end_variance[0]) == pytest.approx(ends_s.std(), rel=0.05)


@pytest.mark.parametrize("running", [0, 20, 100, 130])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("spread_s", [0.0, 0.5, 2.0, 6.0])
def test_late_requests_of_a_run_are_those_of_each_place(running: int, share: float, spread_s: float) -> None:
    """Four groups that share the batch, with deadlines somewhere on the way through each, each request with its own: as one by one by what
    the estimator says."""
    count = 100
    groups = [group(number, "alpha", count) for number in range(4)]
    view = views(groups, active="alpha", running=running, warm=())
    times = group_times(view, CATALOGUE, SNAPSHOT)
    slos_s = [(1.0 - share) * time.first_completion.mean + share * time.last_completion.mean for time in times]
    table = Assessment(CATALOGUE, SNAPSHOT, [view]).table
    expected = 0.0
    for number, slo_s in enumerate(slos_s):
        each = table.times([number] * count, np.arange(count))
        expected += sum(
            Normal(float(mean), float(variance) + (RELATIVE_DEVIATION * float(mean)) ** 2).probability_above(slo_s + own_s)
            for mean, variance, own_s in zip(
                each.completion_s, each.completion_variance, np.linspace(0.0, spread_s, count).tolist(), strict=True
            )
        )
    due = [group(number, "alpha", count, slo_s) for number, slo_s in enumerate(slos_s)]
    for each_due in due:
        each_due.last_deadline_s += spread_s
    assert line(due, active="alpha", running=running).timeline(START_S).cost.late == pytest.approx(expected, rel=0.15, abs=0.06 * 4 * count)


def test_first_token_deadlines_do_not_wait_for_the_output() -> None:
    completion = line([group(1, "alpha", 10, 0.8)], active="alpha").timeline(START_S).cost
    first_token = line([group(1, "alpha", 10, 0.8, SloKind.FIRST_TOKEN)], active="alpha").timeline(START_S).cost
    assert completion.late > 9.0
    assert first_token.late < 1.0


def test_requests_without_a_deadline_are_never_late() -> None:
    lonely = group(1, "alpha", 10_000, math.inf, SloKind.PRIORITY)
    cost = line([lonely], active="alpha").timeline(START_S).cost
    assert cost.late == 0.0
    assert cost.tardiness_s == 0.0
    assert math.isfinite(cost.weighed(Policy()))


def test_weights_are_those_of_the_design() -> None:
    """One late request outweighs 1,000 request-seconds of tardiness and 100 GPU-seconds of work."""
    policy = Policy()
    late = Cost(late=1.0).weighed(policy)
    assert late >= Cost(tardiness_s=1000.0).weighed(policy)
    assert late >= Cost(swap_s=100.0).weighed(policy)
    assert Cost(late=1.0, swaps=1) + Cost(late=2.0, swaps=2) == Cost(late=3.0, swaps=3)


def test_a_group_that_the_instance_cannot_serve_weighs_nothing() -> None:
    stranger = group(1, "delta", 100)
    cost = line([stranger, group(2, "alpha", 1)], active="alpha").timeline(START_S).cost
    assert cost.late == pytest.approx(0.0, abs=1e-6)
    assert math.isfinite(cost.weighed(Policy()))
