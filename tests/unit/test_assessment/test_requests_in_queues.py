"""Waits and completions of requests where they are, against the times of their groups."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from predicted_times import group_times
from qlm_core.prediction.queue_columns import SERVICE
from qlm_core.prediction.queue_reader import QueueReader
from qlm_core.statistics.distribution import Normal

from .queues import CATALOGUE, NOW_S, SHIPPED, TWO, assessed, group_of, predicted, view_of


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


@pytest.mark.parametrize("place", [-1.0, math.nan])
def test_impossible_places_are_refused(place: float) -> None:
    with pytest.raises(ValueError, match="position"):
        assessed(*TWO).table.times([0], [place])


@pytest.mark.parametrize("most", [1, 16, 64, 256, 1_024])
def test_an_output_under_a_limit_is_as_long_as_its_class_makes_them_up_to_that(most: int) -> None:
    """Nearly all of a chat's answers are longer than 16 tokens: one that may have so many takes them. Against draws of the curve."""
    curve = SHIPPED.output_curve_for("chat", "64s", "1024")
    drawn = [min(curve.quantile((number + 0.5) / 2_000), most) for number in range(2_000)]
    rows = QueueReader(CATALOGUE, SHIPPED).request_rows([(view_of("a"), replace(group_of("", 1), output_tokens_max=float(most)))])
    output, variance = rows[SERVICE : SERVICE + 2, 0].tolist()
    assert output == pytest.approx(np.mean(drawn), rel=0.02)
    assert math.sqrt(variance) == pytest.approx(np.std(drawn), rel=0.05, abs=0.3)


def test_a_given_output_stays_within_its_limit() -> None:
    for given, expected in ((Normal(300.0, 400.0), 256.0), (Normal(0.0, 0.0), 1.0), (Normal(90.0, 400.0), 90.0)):
        request = replace(group_of("", 1), output_tokens_max=256.0, output_tokens=given)
        assert QueueReader(CATALOGUE, SHIPPED).request_rows([(view_of("a"), request)])[SERVICE, 0] == expected


def test_the_waits_along_a_queue_are_those_of_its_requests() -> None:
    made = assessed(*TWO)
    curve = made.queue_curve("a", 64)
    assert curve is not None
    assert curve.ahead == (0.0, 699.0, 700.0, 999.0, 1_000.0, 1_039.0)
    _, number = made.number_of("a2") or ("", -1)
    assert curve.wait_s[2:4] == pytest.approx(made.table.times([number, number], [0, 299]).wait_s.tolist())
    assert made.queue_curve("nobody's", 64) is None


def test_a_queue_that_cannot_be_predicted_is_left_out() -> None:
    made = assessed(TWO[0], view_of("b", group_of("x", 1, "alien")))
    assert made.instances == ("a",)
    assert made.number_of("x") is None


def test_nothing_to_assess() -> None:
    made = assessed()
    assert made.instances == ()
    assert made.alone([group_of("", 1)], NOW_S, [0.0]) == [None]
    assert predicted((view_of("a", running=0),), group_of("", 1)).wait.mean == 0.0
