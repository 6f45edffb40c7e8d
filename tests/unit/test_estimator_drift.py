"""Drift of an instance: noticed within a stated number of runs, never imagined, and told with its beginning."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_estimator.drift import SETTLED_RUNS, WARM_UP_RUNS, DriftDetector, Shift

PREDICTED_S = 5.0
EVERY_S = 0.5
LEARNED = 1_000.0


def engine_errors(seed: int, *, wander: float = 0.1, each: float = 0.1) -> Iterator[float]:
    """Logarithms of measured over predicted, without end. `each`: of every run by itself, more than 5% of noise on each of its steps
    leaves; `wander`: what the runs of a batch have in common, which changes over 20 runs."""
    random = np.random.default_rng(seed)
    common, kept = 0.0, math.exp(-1.0 / 20.0)
    while True:
        common = kept * common + math.sqrt(1.0 - kept * kept) * wander * float(random.standard_normal())
        yield common + each * float(random.standard_normal())


def shifts(detector: DriftDetector, errors: Iterator[float], runs: int, *, from_run: int = 0) -> list[tuple[int, Shift]]:
    """The shifts that these runs made certain, with the number of the run."""
    found = []
    for number, error in enumerate(itertools.islice(errors, runs), start=from_run):
        shift = detector.add(number * EVERY_S, 1.0, LEARNED, PREDICTED_S * math.exp(error), PREDICTED_S)
        if shift is not None:
            found.append((number, shift))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_no_alarm_over_ten_thousand_noisy_runs(seed: int) -> None:
    detector = DriftDetector()
    assert shifts(detector, engine_errors(seed), 10_000) == []
    assert detector.drifting_since_s == 0.0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("change", "runs_max"), [(2.0, 30), (0.5, 30), (4.0, 25), (1.5, 120), (1 / 1.5, 120)])
def test_a_change_is_noticed(seed: int, change: float, runs_max: int) -> None:
    detector, errors = DriftDetector(), engine_errors(seed)
    assert shifts(detector, errors, 500) == []
    (number, shift), *_ = shifts(detector, (error + math.log(change) for error in errors), runs_max, from_run=500)
    assert shift.since_s == pytest.approx(500 * EVERY_S, abs=20 * EVERY_S)
    assert number <= 500 + runs_max
    assert shift.measured_s / shift.predicted_s == pytest.approx(change, rel=0.35)
    assert detector.drifting_since_s == shift.since_s


def test_a_small_change_is_left_to_learning() -> None:
    assert shifts(DriftDetector(), (error + math.log(1.1) for error in engine_errors(3)), 2_000) == []


def test_one_absurd_run_is_no_drift() -> None:
    detector, errors = DriftDetector(), engine_errors(4)
    for absurd in (16.0, 1.0 / 16.0) * 5:
        assert shifts(detector, iter([math.log(absurd)]), 1) == []
        assert shifts(detector, errors, 30) == []


def test_errors_of_the_prior_are_not_drift() -> None:
    detector = DriftDetector()
    for number in range(500):
        assert detector.add(number * EVERY_S, 1.0, WARM_UP_RUNS - 1.0, 3.0 * PREDICTED_S, PREDICTED_S) is None


def test_runs_that_one_long_prefill_held_up_are_no_drift() -> None:
    """Forty end in each second: for three of them all took twice as long, and then none does. Where it stays so, it is noticed."""
    detector, at_s = DriftDetector(), 0.0
    for factor, runs, noticed in ((1.0, 400, 0), (2.0, 120, 0), (1.0, 400, 0), (2.0, 480, 1)):
        found = 0
        for _ in range(runs):
            at_s += 1.0 / 40.0
            found += detector.add(at_s, 1.0, LEARNED, factor * PREDICTED_S, PREDICTED_S) is not None
        assert (found > 0) == bool(noticed)


def test_the_time_that_a_drift_takes_is_that_of_the_instance() -> None:
    """Its clock runs a hundred times as fast: thirty runs of 5 s each, two a second by its clock, end in 0.15 s."""
    detector, found = DriftDetector(), 0
    for number in range(530):
        error = math.log(2.0) if number >= 500 else 0.0
        shift = detector.add(number * EVERY_S / 100.0, 1.0, LEARNED, PREDICTED_S * math.exp(error), PREDICTED_S, 100.0)
        found += shift is not None
    assert found == 1


def test_it_settles_and_then_no_longer_drifts() -> None:
    """A restored one too, as it was published."""
    detector = DriftDetector()
    shifts(detector, itertools.repeat(0.0), 100)
    assert len(shifts(detector, itertools.repeat(math.log(2.0)), 21, from_run=100)) == 1
    for drifting in (detector, DriftDetector.restored(detector.drifting_since_s)):
        shifts(drifting, itertools.repeat(0.0), SETTLED_RUNS - 1, from_run=121)
        assert drifting.drifting_since_s == 100 * EVERY_S
        shifts(drifting, itertools.repeat(0.0), 1, from_run=121 + SETTLED_RUNS)
        assert drifting.drifting_since_s == 0.0


def test_a_second_change_keeps_the_time_of_the_first() -> None:
    detector = DriftDetector.restored(0.0)
    shifts(detector, itertools.repeat(0.0), 100)
    shifts(detector, itertools.repeat(math.log(2.0)), 30, from_run=100)
    first_s = detector.drifting_since_s
    assert first_s == 100 * EVERY_S
    assert shifts(detector, itertools.repeat(math.log(3.0)), 30, from_run=130)
    assert detector.drifting_since_s == first_s


@given(st.lists(st.floats(-20.0, 20.0), max_size=200))
def test_whatever_comes_the_sums_are_those_of_runs_that_were_told(errors: list[float]) -> None:
    detector = DriftDetector()
    for number, shift in shifts(detector, iter(errors), len(errors)):
        assert 1 <= shift.runs <= number + 1
        assert shift.predicted_s == pytest.approx(shift.runs * PREDICTED_S)
        assert 0.0 <= shift.since_s <= number * EVERY_S
