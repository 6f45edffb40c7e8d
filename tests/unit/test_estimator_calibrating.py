"""The calibrator against processes of which bias and spread are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from qlm_core.calibration import CalibratedTime, CalibrationProfile
from qlm_core.distribution import Normal
from qlm_estimator.calibrating import PRIOR_PAIRS, SURPRISE_MAX, Calibrator, few_pairs_variance
from qlm_estimator.predictions import Judged, Predicted, told

ROWS_MAX = 100


def judged(
    at_s: float, own: Normal, actual_s: float, *, model: str = "m", instance: str = "a", completion: tuple[Normal, float] | None = None
) -> Judged:
    """A prediction told at `at_s` and what came, at once."""
    done = completion if completion is not None else (own, actual_s)
    predicted = Predicted(
        queue_id="1",
        at_s=at_s,
        completion=told(done[0].mean, done[0].quantile(0.9), own=done[0]),
        wait=told(own.mean, own.quantile(0.9), own=own),
        model=model,
        gpu="A100-80GB",
        n_gpu=1,
        instance=instance,
    )
    return Judged(predicted=predicted, at_s=at_s, completion_s=done[1], wait_s=actual_s)


def row_of(calibrator: Calibrator, *, model: str = "m", instance: str = "a") -> CalibrationProfile:
    return next(row for row in calibrator.profiles() if row.key == ("wait", model, "A100-80GB", 1, instance))


def learned(seed: int, *, factor: float, offset_s: float, relative: float, pairs: int = 600) -> Calibrator:
    """Waits of 20 to 400 s, each told when the one before has come, so that all are independent."""
    rng = np.random.default_rng(seed)
    calibrator = Calibrator(rows_max=ROWS_MAX)
    at_s = 0.0
    for _ in range(pairs):
        mean = float(rng.uniform(20.0, 400.0))
        at_s += mean
        actual = (factor * mean + offset_s) * (1.0 + relative * float(rng.normal()))
        calibrator.add(judged(at_s, Normal(mean, 1.0), max(0.0, actual)))
    return calibrator


@pytest.mark.parametrize(("factor", "offset_s"), [(1.0, 0.0), (1.1, 0.0), (0.9, 3.0), (1.0, -4.0)])
@pytest.mark.parametrize("relative", [0.02, 0.1])
def test_bias_and_spread_of_a_known_process_are_found(factor: float, offset_s: float, relative: float) -> None:
    row = row_of(learned(1, factor=factor, offset_s=offset_s, relative=relative))
    assert row.applied(Normal(200.0, 1.0)).mean == pytest.approx(factor * 200.0 + offset_s, rel=2.0 * relative / math.sqrt(20.0) + 0.01)
    assert 0.6 * relative < row.applied(Normal(200.0, 1.0)).deviation / 200.0 < 2.0 * relative


def test_the_quantiles_of_a_known_process_are_true() -> None:
    """Coverage of p90 over the second half, each prediction calibrated by what was known before it."""
    rng = np.random.default_rng(7)
    calibrator, at_s, within = Calibrator(rows_max=ROWS_MAX), 0.0, []
    for number in range(1_500):
        own = Normal(float(rng.uniform(20.0, 400.0)), 4.0)
        at_s += own.mean
        actual = 1.05 * own.mean * (1.0 + 0.05 * float(rng.normal()))
        if number >= 750:
            within.append(actual <= row_of(calibrator).applied(own).quantile(0.9))
        calibrator.add(judged(at_s, own, actual))
    assert 0.86 < np.mean(within) < 0.95


def test_the_p90_of_few_pairs_is_that_of_students_t() -> None:
    for pairs in (0.0, 0.5, 1.0, 3.0, 10.0, 40.0):
        expected = stats.t.ppf(0.9, pairs + PRIOR_PAIRS) / stats.norm.ppf(0.9)
        assert math.sqrt(few_pairs_variance(pairs)) == pytest.approx(expected, rel=4e-3)


def test_the_quantiles_of_the_first_pairs_are_true() -> None:
    """Levels that stay alike: each service errs by its own 4% or so, more than is believed at first, of which the first few pairs tell.
    p90 nearly holds for the next."""
    rng, within = np.random.default_rng(11), []
    for _ in range(400):
        calibrator, own = Calibrator(rows_max=ROWS_MAX), Normal(200.0, 1.0)
        for number in range(5):
            actual = 200.0 * (1.0 + 0.04 * float(rng.normal()))
            if number >= 1:
                within.append(actual <= row_of(calibrator).applied(own).quantile(0.9))
            calibrator.add(judged(1e3 * number, own, actual))
    assert 0.85 < np.mean(within) < 0.96


def test_requests_that_waited_together_count_as_one() -> None:
    """A hundred of one second, all late alike, are one piece of evidence: they must not move what twenty independent ones said."""
    calibrator = learned(3, factor=1.0, offset_s=0.0, relative=0.02, pairs=200)
    before = row_of(calibrator)
    for number in range(100):
        calibrator.add(judged(1e6 + number / 100.0, Normal(200.0, 1.0), 260.0))
    after = row_of(calibrator)
    assert after.samples < before.samples + 1.5
    assert after.applied(Normal(200.0, 1.0)).mean < 206.0


def test_an_absurd_wait_does_not_poison_a_row() -> None:
    calibrator = learned(4, factor=1.0, offset_s=0.0, relative=0.02)
    before = row_of(calibrator).applied(Normal(200.0, 1.0))
    calibrator.add(judged(1e7, Normal(200.0, 1.0), 1e6))
    after = row_of(calibrator).applied(Normal(200.0, 1.0))
    assert after.mean == pytest.approx(before.mean, rel=0.02)
    assert after.deviation <= before.deviation * math.sqrt(SURPRISE_MAX) * 1.3


def test_large_errors_widen_at_once_and_good_ones_narrow_again() -> None:
    calibrator = learned(5, factor=1.0, offset_s=0.0, relative=0.02)
    own, usual = Normal(200.0, 1.0), row_of(calibrator).applied(Normal(200.0, 1.0)).deviation
    for number in range(10):
        calibrator.add(judged(1e7 + 30.0 * number, own, 230.0))
    assert row_of(calibrator).applied(own).deviation > 1.8 * usual
    for number in range(60):
        calibrator.add(judged(1e7 + 300.0 + 100.0 * number, own, row_of(calibrator).applied(own).mean))
    assert row_of(calibrator).applied(own).deviation < 1.6 * usual


def test_what_was_told_before_the_work_changed_is_left_out() -> None:
    calibrator = learned(6, factor=1.0, offset_s=0.0, relative=0.02)
    before = row_of(calibrator)
    calibrator.note_work(1e7, "m", "a", 0.2)
    calibrator.note_work(1e7 + 60.0, "m", "a", 0.4)
    assert not calibrator.add(judged(1e7 + 30.0, Normal(200.0, 1.0), 400.0))
    assert row_of(calibrator) == before
    assert calibrator.add(judged(1e7 + 61.0, Normal(200.0, 1.0), 200.0))


def test_a_clock_that_was_set_back_hides_no_change_of_the_work() -> None:
    """It showed a day later for a moment."""
    calibrator = learned(1, factor=1.0, offset_s=0.0, relative=0.02)
    before = calibrator.profiles()
    for at_s, work_s in ((1e7, 0.2), (1e7 + 86_400.0, 0.2), (1e7 + 60.0, 0.4)):
        calibrator.note_work(at_s, "m", "a", work_s)
    assert not calibrator.add(judged(1e7 + 30.0, Normal(100.0, 1.0), 200.0))
    assert calibrator.profiles() == before


def test_a_pair_does_not_count_for_the_time_of_those_left_out() -> None:
    """The first after a change, told while that was being learned, is a twentieth of a pair: it was told 11 s after the one before it."""
    calibrator = learned(6, factor=1.0, offset_s=0.0, relative=0.02, pairs=5)
    before, own = row_of(calibrator), Normal(200.0, 1.0)
    calibrator.note_work(1e7, "m", "a", 0.2)
    calibrator.note_work(1e7 + 60.0, "m", "a", 0.4)
    for second in range(51):
        assert not calibrator.add(judged(1e7 + second, own, 400.0))
    assert calibrator.add(judged(1e7 + 61.0, own, 250.0))
    after = row_of(calibrator)
    assert 0.0 < after.samples - before.samples < 11.0 / 200.0
    assert after.applied(own).deviation < 1.6 * before.applied(own).deviation


def test_a_new_instance_begins_with_what_its_pair_says() -> None:
    calibrator = learned(8, factor=1.2, offset_s=0.0, relative=0.02)
    calibrator.add(judged(1e7, Normal(100.0, 1.0), 120.0, instance="b"))
    assert row_of(calibrator, instance="b").applied(Normal(100.0, 1.0)).mean == pytest.approx(120.0, rel=0.03)


@pytest.mark.parametrize("alone", [True, False])
def test_a_wait_on_an_instance_of_one_model_begins_narrower(alone: bool) -> None:
    calibrator = Calibrator(rows_max=ROWS_MAX)
    calibrator.add(judged(1.0, Normal(200.0, 0.0), 200.0), alone=alone)
    own = Normal(200.0, 0.0)
    wide = next(row for row in calibrator.profiles() if row.key == ("wait", "", "", 0, "")).applied(own).deviation
    instance = row_of(calibrator).applied(own).deviation
    assert wide > 0.02 * 200.0, "what stands for any instance stays wide"
    assert instance < 0.6 * wide if alone else 0.5 * wide < instance <= wide
    done = next(row for row in calibrator.profiles() if row.key == ("completion", "m", "A100-80GB", 1, "a"))
    assert done.applied(own).deviation > 0.5 * wide, "of completions nothing else is believed"


def test_what_was_shown_to_be_wide_does_not_stay_narrow() -> None:
    """An instance of one model that errs by 5%, each wait by itself: twenty waits tell."""
    rng, calibrator = np.random.default_rng(12), Calibrator(rows_max=ROWS_MAX)
    for number in range(20):
        calibrator.add(judged(1e3 * number, Normal(200.0, 0.0), 200.0 * (1.0 + 0.05 * float(rng.normal()))), alone=True)
    assert row_of(calibrator).applied(Normal(200.0, 0.0)).deviation > 0.035 * 200.0


def test_waits_and_completions_are_told_apart() -> None:
    calibrator = Calibrator(rows_max=ROWS_MAX)
    for number in range(300):
        own, done = Normal(100.0, 1.0), Normal(150.0, 1.0)
        calibrator.add(judged(200.0 * number, own, 110.0, completion=(done, 150.0)))
    rows = {row.time: row for row in calibrator.profiles() if row.instance}
    assert rows[CalibratedTime.WAIT].applied(Normal(100.0)).mean == pytest.approx(110.0, rel=0.02)
    assert rows[CalibratedTime.COMPLETION].applied(Normal(150.0)).mean == pytest.approx(150.0, rel=0.01)


def test_published_rows_are_taken_as_the_state() -> None:
    first = learned(9, factor=1.1, offset_s=2.0, relative=0.03)
    again = Calibrator(rows_max=ROWS_MAX)
    again.restore(first.profiles())
    for old, new in zip(first.profiles(), again.profiles(), strict=True):
        assert new.key == old.key
        before, after = old.applied(Normal(200.0, 1.0)), new.applied(Normal(200.0, 1.0))
        assert after.mean == pytest.approx(before.mean)
        assert after.deviation == pytest.approx(before.deviation)
        assert new.samples == old.samples


def test_the_rows_that_were_not_updated_for_the_longest_go_first() -> None:
    calibrator = Calibrator(rows_max=8)
    for number in range(50):
        calibrator.add(judged(float(number), Normal(10.0, 1.0), 10.0, model=f"m{number}", instance=f"i{number}"))
    rows = calibrator.profiles()
    assert len(rows) <= 8
    assert any(row.model == "m49" for row in rows)


@pytest.mark.parametrize("actual_s", [math.nan, math.inf, -1.0])
def test_what_cannot_have_happened_is_left_out(actual_s: float) -> None:
    calibrator = Calibrator(rows_max=ROWS_MAX)
    assert not calibrator.add(judged(1.0, Normal(10.0, 1.0), actual_s))
    assert calibrator.profiles() == ()


@given(
    pairs=st.lists(st.tuples(st.floats(-1e3, 1e9), st.floats(0.0, 1e6), st.floats(0.0, 1e9), st.floats(0.0, 1e7)), min_size=1, max_size=30)
)
def test_rows_are_always_such_as_may_be_published(pairs: list[tuple[float, float, float, float]]) -> None:
    """Any times, also such that go back, any predictions and whatever came: the rows stay within their bounds."""
    calibrator = Calibrator(rows_max=ROWS_MAX)
    for at_s, mean, variance, actual_s in pairs:
        calibrator.add(judged(at_s, Normal(mean, variance), actual_s))
    for row in calibrator.profiles():
        assert 0.5 <= row.bias_factor <= 2.0
        assert row.applied(Normal(100.0, 1.0)).variance > 0.0
