"""How many requests of each group are late, and by how much, against its requests one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predicted_times import group_times
from qlm_core.distribution import Normal
from qlm_core.prediction_views import QueueView
from qlm_core.queue_columns import SERVICE
from qlm_core.queue_reader import QueueReader
from qlm_core.request import SloKind

from .queues import CATALOGUE, NOW_S, SHIPPED, TWO, assessed, group_of, instance_of, predicted, view_of


def test_late_requests_are_those_of_each_group() -> None:
    """As the sum over all requests, each with its own place, time and deadline."""
    views = (_spread(TWO[0], 40.0), TWO[1])
    made = assessed(*views)
    late, tardiness = made.late(NOW_S)
    for at, group in enumerate(group for view in views for group in view.groups):
        places = np.arange(group.waiting)
        times = made.table.times(np.full(group.waiting, at), places)
        last_s = max(group.first_deadline_s, group.last_deadline_s)
        deadlines_s = np.linspace(group.first_deadline_s, last_s, group.waiting)
        ends = [Normal(float(mean), float(variance)) for mean, variance in zip(times.completion_s, times.completion_variance, strict=True)]
        left_s = [float(deadline_s) - NOW_S for deadline_s in deadlines_s]
        assert late[at] == pytest.approx(
            sum(end.probability_above(left) for end, left in zip(ends, left_s, strict=True)), abs=0.02 * group.waiting
        )
        excess_s = sum(end.floored(left).mean - left for end, left in zip(ends, left_s, strict=True))
        assert tardiness[at] == pytest.approx(excess_s, rel=0.05, abs=1.0)


@pytest.mark.parametrize("slack_s", [12.0, 25.0, 40.0])
def test_a_group_of_one_or_two_is_late_as_its_requests_are(slack_s: float) -> None:
    for waiting in (1, 2):
        group = replace(group_of("g", waiting, slack_s=slack_s), last_deadline_s=NOW_S + slack_s + 3.0 * (waiting - 1))
        view = view_of("a", group_of("before", 200, slack_s=0.0), group)
        time = group_times(view, CATALOGUE, SHIPPED)[1]
        ends = [time.first_completion, time.last_completion][:waiting]
        wanted = sum(NormalDist(end.mean, end.deviation).cdf(slack_s + 3.0 * number) for number, end in enumerate(ends))
        assert assessed(view).late(NOW_S)[0][1] == pytest.approx(waiting - wanted, abs=0.02)


def _spread(view: QueueView, seconds: float) -> QueueView:
    groups = tuple(replace(group, last_deadline_s=group.first_deadline_s + seconds) for group in view.groups)
    return replace(view, groups=groups)


def test_late_requests_are_those_of_the_time_that_is_asked_for() -> None:
    """And what was computed for another is not taken for it."""
    made = assessed(*TWO)
    counts = []
    for now_s in (NOW_S, NOW_S + 60.0, NOW_S - 60.0):
        for found, expected in zip(made.late(now_s), assessed(*TWO).late(now_s), strict=True):
            assert found == pytest.approx(expected, abs=1e-9)
        counts.append(float(made.late(now_s)[0].sum()))
    assert counts[2] + 50.0 < counts[0] < counts[1] - 50.0


def test_a_group_is_not_late_as_a_whole() -> None:
    """3,000 requests take 300 s: judged by its end, every group of a 20 s objective would be late."""
    group = group_of("g", 3_000, slack_s=20.0)
    (late,), _ = assessed(view_of("a", group, running=0)).late(NOW_S)
    assert 2_300 < late < 3_000, "the first are in time"
    (spread,), _ = assessed(_spread(view_of("a", group, running=0), 2_000.0)).late(NOW_S)
    assert spread < 300, "those at the end have later deadlines"


@given(st.integers(1, 900), st.floats(-200.0, 900.0), st.floats(0.0, 300.0), st.floats(0.0, 300.0))
@settings(deadline=None)
def test_late_requests_are_a_part_and_fall_with_later_deadlines(waiting: int, slack_s: float, spread_s: float, more_s: float) -> None:
    group = replace(group_of("g", waiting, slack_s=slack_s), last_deadline_s=NOW_S + slack_s + spread_s)
    relaxed = replace(group, first_deadline_s=group.first_deadline_s + more_s, last_deadline_s=NOW_S + slack_s + spread_s + more_s)
    (late,), (tardiness,) = assessed(view_of("a", group)).late(NOW_S)
    (later,), (less,) = assessed(view_of("a", relaxed)).late(NOW_S)
    assert 0.0 <= later <= late + 1e-9 <= waiting + 1e-6
    assert 0.0 <= less <= tardiness + 1e-6


def test_what_has_no_deadline_is_never_late_and_what_is_past_always() -> None:
    endless = replace(group_of("p", 10), slo_kind=SloKind.PRIORITY, first_deadline_s=math.inf)
    late, tardiness = assessed(view_of("a", endless, group_of("past", 40, slack_s=-1.0))).late(NOW_S)
    assert late.tolist() == [0.0, pytest.approx(40.0)]
    assert tardiness[0] == 0.0
    assert tardiness[1] > 40.0


def test_first_tokens_are_not_late_by_the_output() -> None:
    group = group_of("g", 1, slack_s=1.0)
    (completion,), _ = assessed(view_of("a", group, running=0)).late(NOW_S)
    (first_token,), _ = assessed(view_of("a", replace(group, slo_kind=SloKind.FIRST_TOKEN), running=0)).late(NOW_S)
    assert completion > 0.5
    assert first_token < 0.01
    long = replace(group, slo_kind=SloKind.FIRST_TOKEN, waiting_prompt_tokens=8_000, first_deadline_s=NOW_S + 0.3)
    (late,), (tardiness,) = assessed(view_of("a", long, running=0)).late(NOW_S)
    assert late > 0.99, "it starts at once, but 8,000 tokens take 0.7 s"
    assert tardiness == pytest.approx(0.4, abs=0.1)


# Single requests where they wait, against the times of their groups ---------------------------------------------------


@pytest.mark.parametrize("prompt", [500, 6_000])
def test_the_first_and_the_last_of_a_group_are_those_of_its_times(prompt: int) -> None:
    views = [
        replace(view, groups=tuple(replace(group, waiting_prompt_tokens=prompt * group.waiting) for group in view.groups)) for view in TWO
    ]
    made = assessed(*views)
    for view in views:
        for group, time in zip(view.groups, group_times(view, CATALOGUE, SHIPPED), strict=True):
            instance, number = made.number_of(group.group_id) or ("", -1)
            assert instance == view.instance.name
            found = made.table.times([number, number], [0, group.waiting - 1])
            for at, wait, prefill_s, completion in (
                (0, time.wait, time.prefill_s, time.first_completion),
                (1, time.last_wait, time.last_prefill_s, time.last_completion),
            ):
                assert found.prefill_s[at] == pytest.approx(prefill_s, rel=1e-6)
                assert found.wait_s[at] == pytest.approx(wait.mean, rel=1e-6, abs=1e-9)
                assert found.wait_variance[at] == pytest.approx(wait.variance, rel=1e-6, abs=1e-9)
                assert found.completion_s[at] == pytest.approx(completion.mean, rel=1e-6)
                assert found.completion_variance[at] == pytest.approx(completion.variance, rel=1e-6)
    assert made.number_of("nobody's") is None


def test_requests_wait_longer_the_further_behind_they_are() -> None:
    made = assessed(*TWO)
    _, number = made.number_of("a1") or ("", -1)
    times = made.table.times(np.full(700, number), np.arange(700))
    assert (np.diff(times.wait_s) >= -1e-9).all()
    assert (np.diff(times.wait_variance) >= -1e-9).all()


def test_many_at_once_are_as_one_by_one() -> None:
    made = assessed(*TWO)
    chance = np.random.default_rng(5)
    groups, places = chance.integers(0, 4, 20_000), chance.integers(0, 700, 20_000)
    prompts, outputs = chance.integers(1, 9_000, 20_000), chance.uniform(1.0, 900.0, 20_000)
    variances = chance.uniform(0.0, 1e5, 20_000)
    many = made.table.times(groups, places, prompt_tokens=prompts, output_tokens=outputs, output_variance=variances)
    for at in (0, 8_191, 8_192, 19_999):
        one = made.table.times(
            [groups[at]], [places[at]], prompt_tokens=[prompts[at]], output_tokens=[outputs[at]], output_variance=[variances[at]]
        )
        for name in ("wait_s", "wait_variance", "prefill_s", "completion_s", "completion_variance"):
            assert getattr(one, name)[0] == pytest.approx(getattr(many, name)[at])
        assert many.completion_quantile_s(0.9)[at] == pytest.approx(
            many.completion_s[at] + 1.2815515655446004 * math.sqrt(many.completion_variance[at])
        )
    assert (many.wait_quantile_s(0.001) >= 0.0).all(), "a wait is never negative"


def test_ones_own_prompt_and_output_count() -> None:
    table = assessed(*TWO).table
    short = table.times([0], [10], prompt_tokens=[10], output_tokens=[5.0], output_variance=[0.0])
    long = table.times([0], [10], prompt_tokens=[8_000], output_tokens=[500.0], output_variance=[100.0])
    assert short.wait_s == long.wait_s
    assert short.completion_variance == short.wait_variance
    assert long.completion_s[0] > short.completion_s[0] + 5.0
    row = SHIPPED.hardware_for(instance_of("a"), CATALOGUE["chat"])
    assert row is not None
    assert long.prefill_s[0] > row.prefill_work_s(8_000, 8_000**2), "its chunks ride along with the steps of others"
    one, eight = (
        table.times([0], [10], prompt_tokens=[tokens]).prefill_s[0] - row.prefill_work_s(tokens, tokens**2) for tokens in (2_048, 16_384)
    )
    assert eight == pytest.approx(8.0 * one), "one step for each chunk"


def test_a_wait_has_its_own_spread_and_is_never_negative() -> None:
    """Against draws; those below zero are waits of none."""
    times = assessed(view_of("a", group_of("a1", 100), running=256)).table.times([0], [0])
    dice = np.random.default_rng(3)
    waits_s = np.maximum(dice.normal(times.wait_s[0], math.sqrt(times.wait_variance[0]), 100_000), 0.0)
    assert times.wait_quantile_s(0.01)[0] == np.quantile(waits_s, 0.01) == 0.0
    for level in (0.5, 0.9, 0.99):
        assert times.wait_quantile_s(level)[0] == pytest.approx(np.quantile(waits_s, level), rel=0.03)


@pytest.mark.parametrize("place", [-1.0, math.nan])
def test_impossible_places_are_refused(place: float) -> None:
    with pytest.raises(ValueError, match="position"):
        assessed(*TWO).table.times([0], [place])


@pytest.mark.parametrize("probability", [0.0, 1.0, math.nan])
def test_impossible_probabilities_are_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        assessed(*TWO).table.times([0], [0]).wait_quantile_s(probability)


@pytest.mark.parametrize("most", [1, 16, 64, 256, 1_024])
def test_an_output_under_a_limit_is_as_long_as_its_class_makes_them_up_to_that(most: int) -> None:
    """Nearly all of a chat's answers are longer than 16 tokens: one that may have so many takes them. Against draws of the curve."""
    curve = SHIPPED.output_curve_for("chat", "64s", "1024")
    drawn = [min(curve.quantile((number + 0.5) / 2_000), most) for number in range(2_000)]
    rows = QueueReader(CATALOGUE, SHIPPED).request_rows([view_of("a")], replace(group_of("", 1), output_tokens_max=float(most)))
    output, variance = rows[SERVICE : SERVICE + 2, 0].tolist()
    assert output == pytest.approx(np.mean(drawn), rel=0.02)
    assert math.sqrt(variance) == pytest.approx(np.std(drawn), rel=0.05, abs=0.3)


def test_what_is_told_of_an_output_stays_within_its_limit() -> None:
    for told, expected in ((Normal(300.0, 400.0), 256.0), (Normal(0.0, 0.0), 1.0), (Normal(90.0, 400.0), 90.0)):
        request = replace(group_of("", 1), output_tokens_max=256.0, output_tokens=told)
        assert QueueReader(CATALOGUE, SHIPPED).request_rows([view_of("a")], request)[SERVICE, 0] == expected


def test_the_waits_along_a_queue_are_those_of_its_requests() -> None:
    made = assessed(*TWO)
    curve = made.queue_curve("a", 64)
    assert curve is not None
    assert curve.ahead == (0.0, 699.0, 700.0, 999.0, 1_000.0, 1_039.0)
    _, number = made.number_of("a2") or ("", -1)
    assert curve.wait_s[2:4] == pytest.approx(made.table.times([number, number], [0, 299]).wait_s.tolist())
    assert made.queue_curve("nobody's", 64) is None


def test_a_queue_that_cannot_be_predicted_is_named() -> None:
    made = assessed(TWO[0], view_of("b", group_of("x", 1, "alien")))
    assert (made.unpredictable, made.instances) == ({"b"}, ("a",))
    assert made.number_of("x") is None


def test_nothing_to_assess() -> None:
    made = assessed()
    assert made.instances == ()
    assert [values.tolist() for values in made.late(NOW_S)] == [[], []]
    assert made.newcomer(group_of("", 1), "", NOW_S, [0.0]) is None
    assert predicted((view_of("a", running=0),), group_of("", 1)).wait.mean == 0.0
