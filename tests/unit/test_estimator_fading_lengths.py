"""Output lengths of a class: forgetting, requests that have not ended, outliers."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_core.profiles.workload_profile import WORKLOAD_PRIOR
from qlm_core.statistics.length_curve import BINS, LengthCurve, curve_of_moments
from qlm_estimator.lengths.fading import FadingLengths

PRIOR = WORKLOAD_PRIOR.output_curve()
NONE_RUNNING = np.zeros(BINS)


def finished(lengths: FadingLengths, values: list[int]) -> None:
    for value in values:
        lengths.finish(value, lengths.clock)


def curve_of(lengths: FadingLengths, running: np.ndarray = NONE_RUNNING) -> LengthCurve:
    curve = lengths.curve(running, PRIOR)
    assert curve is not None
    return curve


def test_without_any_that_run_it_is_the_histogram() -> None:
    lengths = FadingLengths(1e9)
    finished(lengths, [5, 5, 10, 16])
    curve = curve_of(lengths)
    assert curve.survival(4) == pytest.approx(1.0)
    assert curve.survival(5) == pytest.approx(0.5)
    assert curve.survival(10) == pytest.approx(0.25)
    assert lengths.moments(curve) == pytest.approx((9.0, np.var([5, 5, 10, 16])))


def test_lower_bounds_move_the_mass_beyond_them() -> None:
    """Kaplan and Meier by hand: 5, 5, more than 8, 10, 16."""
    lengths = FadingLengths(1e9)
    finished(lengths, [5, 5, 10, 16])
    curve = curve_of(lengths, lengths.running_of([(8.0, 0.0)]))
    assert curve.survival(5) == pytest.approx(3 / 5)
    assert curve.survival(10) == pytest.approx(3 / 5 / 2, abs=1e-6)


def test_the_cancelled_count_as_longer_than_what_they_made() -> None:
    given_up, without = FadingLengths(1e9), FadingLengths(1e9)
    for lengths in (given_up, without):
        finished(lengths, [50] * 50 + [400] * 10)
    for _ in range(40):
        given_up.give_up(100.0, given_up.clock)
    assert curve_of(given_up).output_tokens.mean > 1.5 * curve_of(without).output_tokens.mean
    assert given_up.censored(NONE_RUNNING) == pytest.approx(40.0)


def test_a_young_service_is_not_taken_for_a_short_one() -> None:
    """Only the short ones of outputs of 10 to 2,000 tokens at 20 a second are through after 20 s: their mean alone is far too small."""
    rng = np.random.default_rng(3)
    outputs = np.exp(rng.uniform(np.log(10), np.log(2_000), 4_000)).astype(int)
    lengths = FadingLengths(1e9)
    starts_s = rng.uniform(0.0, 20.0, len(outputs))
    through = starts_s + outputs / 20.0 <= 20.0
    finished(lengths, outputs[through].tolist())
    naive, truth = outputs[through].mean(), outputs.mean()
    running = lengths.running_of((20.0 * (20.0 - start_s), 0.0) for start_s in starts_s[~through])
    found = curve_of(lengths, running)
    assert naive < 0.4 * truth
    assert found.output_tokens.mean == pytest.approx(truth, rel=0.35)
    assert found.quantile(0.5) == pytest.approx(np.median(outputs), rel=0.05)


def test_in_the_long_run_those_that_run_change_nothing() -> None:
    """A request weighs by its start, so that the long ones among those that run are not counted in beside their like that finished."""
    rng = np.random.default_rng(4)
    outputs = np.maximum(1, rng.lognormal(4.5, 1.0, 6_000)).astype(int)
    lengths = FadingLengths(300.0)
    started: dict[int, float] = {}
    running: list[tuple[float, int]] = []
    means = []
    for number, output in enumerate(outputs):
        at_s = number / 2.0
        while running and running[0][0] <= at_s:
            ended = heapq.heappop(running)[1]
            lengths.finish(outputs[ended], started[ended])
        started[number] = lengths.clock
        heapq.heappush(running, (at_s + output / 20.0, number))
        if number > 1_500 and number % 100 == 0:
            bounds = lengths.running_of((20.0 * (at_s - which / 2.0), started[which]) for _, which in running)
            means.append(curve_of(lengths, bounds).output_tokens.mean)
    assert np.mean(means) == pytest.approx(outputs.mean(), rel=0.05)


@pytest.mark.parametrize("before", [0, 1, 20, 1_000])
def test_one_endless_answer_does_not_poison_a_class(before: int) -> None:
    lengths, without = FadingLengths(1_000.0), FadingLengths(1_000.0)
    values = np.maximum(1, np.random.default_rng(5).lognormal(5.0, 0.5, before + 1)).astype(int).tolist()
    for each in (lengths, without):
        finished(each, values)
    finished(lengths, [100_000])
    for each in (lengths, without):
        finished(each, values[:10])
    mean, without_mean = lengths.moments(curve_of(lengths))[0], without.moments(curve_of(without))[0]
    samples = len(values) + 1 + len(values[:10])
    assert mean - without_mean < 8_000 / samples  # where 100,000 / samples would be the plain mean's
    assert curve_of(lengths).quantile(0.5) == pytest.approx(curve_of(without).quantile(0.5), rel=0.3)


def test_one_endless_answer_that_has_not_finished_does_not_either() -> None:
    """One that runs, or was cancelled then, among 200 that made 100 tokens."""
    lengths = FadingLengths(1e9)
    finished(lengths, [100] * 200)
    assert curve_of(lengths, lengths.running_of([(100_000.0, lengths.clock)])).output_tokens.mean < 150.0
    lengths.give_up(100_000.0, lengths.clock)
    assert curve_of(lengths).output_tokens.mean < 150.0


def test_what_outlives_all_is_longer_than_that() -> None:
    """Half of the requests have made 200 tokens and run on; the wider class has none so long: as long again."""
    lengths = FadingLengths(1e9)
    finished(lengths, [100] * 10)
    curve = lengths.curve(lengths.running_of([(200.0, 0.0)] * 10), curve_of_moments(20.0, 10.0))
    assert curve is not None
    assert curve.survival(350.0) == pytest.approx(0.5)


def test_the_cancelled_fade_and_nothing_jumps_where_weights_are_scaled_down() -> None:
    """Weights grow with every finish and are divided now and then, here at the 570th: what goes on as before keeps its figures."""
    lengths = FadingLengths(10.0)
    figures = []
    for number in range(1_500):
        finished(lengths, [40, 400])
        lengths.give_up(100.0, lengths.clock)
        if number >= 100:
            figures.append((*lengths.moments(curve_of(lengths)), lengths.censored(NONE_RUNNING)))
    assert np.ptp(figures, axis=0) == pytest.approx(np.zeros(3), abs=1e-3)
    assert figures[-1][2] == pytest.approx(5.0, rel=0.2), "half of the finishes that count, which are the memory"


def test_a_class_that_really_grew_is_followed() -> None:
    lengths = FadingLengths(100.0)
    finished(lengths, [100] * 500)
    finished(lengths, [20_000] * 500)
    assert lengths.moments(curve_of(lengths))[0] == pytest.approx(20_000, rel=0.02)


def test_a_restored_class_goes_on() -> None:
    lengths = FadingLengths(200.0)
    finished(lengths, [120] * 100)
    again = FadingLengths(200.0)
    again.restore(80.0, curve_of(lengths), 120.0)
    assert again.moments(curve_of(again))[0] == pytest.approx(120.0)
    finished(again, [240] * 1_000)
    assert again.moments(curve_of(again))[0] == pytest.approx(240.0, rel=0.02)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["finish", "give up"]), st.integers(1, 200_000), st.integers(0, 50)), min_size=1, max_size=60),
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 60)), max_size=20),
    st.floats(2.0, 1e6),
)
def test_whatever_happens_it_is_a_distribution(history: list[tuple[str, int, int]], bounds: list[tuple[float, int]], memory: float) -> None:
    lengths = FadingLengths(memory)
    finishes = 0
    for kind, tokens, before in history:
        started = max(0.0, lengths.clock - before)
        if kind == "finish":
            lengths.finish(tokens, started)
            finishes += 1
        else:
            lengths.give_up(tokens, started)
    curve = lengths.curve(lengths.running_of(bounds), curve_of_moments(300.0, 1e4))
    assert curve is not None or not finishes or memory < 10.0
    if curve is not None:
        assert curve.shares.sum() == pytest.approx(1.0)
        mean, variance = lengths.moments(curve)
        assert mean >= 1.0
        assert variance >= 0.0
