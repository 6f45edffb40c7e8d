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
from qlm_core.request import SloKind

from .queues import CATALOGUE, NOW_S, SHIPPED, TWO, assessed, group_of, view_of


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
