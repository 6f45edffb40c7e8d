"""Outputs of a model that change by so much that what was learned is wrong."""

from __future__ import annotations

import numpy as np

from qlm_estimator.length_shift import WINDOW, LengthShift
from qlm_estimator.lengths import LengthLearner


def finishes(rng: np.random.Generator, factor: float, count: int) -> list[tuple[float, float, float]]:
    """Mean and median that were expected of each, of two classes, and what it made."""
    expected = rng.choice([60.0, 400.0], size=count)
    return [(float(each), float(each * np.exp(-0.08)), float(each * factor * rng.lognormal(-0.08, 0.4))) for each in expected]


def alarms(shift: LengthShift, told: list[tuple[float, float, float]], *, from_s: float = 0.0, every_s: float = 0.5) -> int:
    return sum(shift.add(from_s + every_s * number, *each) for number, each in enumerate(told))


def test_a_doubling_is_noticed_and_hardly_ever_seen_where_there_is_none() -> None:
    """A false alarm costs little: the classes are learned anew. Outputs vary by 42% inside of two classes."""
    false, noticed = 0, 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        shift = LengthShift()
        false += alarms(shift, finishes(rng, 1.0, 500)) > 0
        noticed += alarms(shift, finishes(rng, 2.0, 3 * WINDOW), from_s=250.0) > 0
    assert false == 0
    assert noticed >= 19


def test_a_doubling_is_noticed_within_half_a_minute_at_any_rate() -> None:
    for rate in (8.0, 30.0, 300.0):
        rng = np.random.default_rng(3)
        shift = LengthShift()
        assert not alarms(shift, finishes(rng, 1.0, int(100 * rate)), every_s=1.0 / rate)
        assert alarms(shift, finishes(rng, 2.0, int(30 * rate)), from_s=100.0, every_s=1.0 / rate) >= 1


def test_a_burst_of_a_second_is_no_change() -> None:
    """Sixty a second: those of two seconds ran together, and made twice as much."""
    rng = np.random.default_rng(1)
    shift = LengthShift()
    told = [*finishes(rng, 1.0, 1_800), *finishes(rng, 2.0, 120), *finishes(rng, 1.0, 1_800)]
    assert not alarms(shift, told, every_s=1.0 / 60.0)


def test_few_finishes_are_looked_at_for_as_long_as_they_take_and_none_is_kept_for_ever() -> None:
    rng = np.random.default_rng(1)
    shift = LengthShift()
    assert not alarms(shift, finishes(rng, 1.0, 300), every_s=40.0)
    assert alarms(shift, finishes(rng, 3.0, 3 * WINDOW), from_s=12_000.0, every_s=40.0) >= 1
    for number in range(1_000):
        shift.add(30_000.0 + 3.0 * number, 50.0, 50.0, 50.0)
    assert len(shift._parts) <= WINDOW + 1


def test_a_clock_that_was_set_back_begins_anew() -> None:
    rng = np.random.default_rng(1)
    shift = LengthShift()
    assert not alarms(shift, finishes(rng, 1.0, 300), from_s=1e6)
    assert alarms(shift, finishes(rng, 2.0, 3 * WINDOW), from_s=10.0) >= 1


def test_one_absurd_output_is_no_change() -> None:
    rng = np.random.default_rng(1)
    shift = LengthShift()
    assert not alarms(shift, [*finishes(rng, 1.0, 200), (400.0, 370.0, 100_000.0), *finishes(rng, 1.0, 20)])


def test_long_answers_of_a_few_are_no_change_of_all() -> None:
    """A fifth of the requests makes ten times as much as was expected, the others what they always made."""
    rng = np.random.default_rng(1)
    shift = LengthShift()
    told = [
        (mean, median, made * (10.0 if number % 5 == 0 else 1.0)) for number, (mean, median, made) in enumerate(finishes(rng, 1.0, 300))
    ]
    assert not alarms(shift, told)


def test_after_forgetting_a_class_follows_its_new_lengths_at_once() -> None:
    learner = LengthLearner(memory=1000.0, rows_max=100)
    for _ in range(1_000):
        learner.finish(learner.classes("m", "", "256"), 100, 50)
    learner.profiles()
    learner.forget("m", 5.0)
    for _ in range(20):
        learner.finish(learner.classes("m", "", "256"), 100, 100)
    row = next(row for row in learner.profiles() if row.token_class)
    assert row.output_tokens_mean > 85.0
