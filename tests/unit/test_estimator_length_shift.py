"""Outputs of a model that change by so much that what was learned is wrong."""

from __future__ import annotations

import numpy as np

from qlm_estimator.length_shift import WINDOW, LengthShift
from qlm_estimator.lengths import LengthLearner


def finishes(rng: np.random.Generator, factor: float, count: int) -> list[tuple[float, float, float]]:
    """Mean and median that were expected of each, of two classes, and what it made."""
    expected = rng.choice([60.0, 400.0], size=count)
    return [(float(each), float(each * np.exp(-0.08)), float(each * factor * rng.lognormal(-0.08, 0.4))) for each in expected]


def alarms(shift: LengthShift, told: list[tuple[float, float, float]]) -> int:
    return sum(shift.add(*each) for each in told)


def test_a_doubling_is_noticed_and_hardly_ever_seen_where_there_is_none() -> None:
    """A false alarm costs little: the classes are learned anew. Outputs vary by 42% inside of two classes."""
    false, noticed = 0, 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        shift = LengthShift()
        false += alarms(shift, finishes(rng, 1.0, 500)) > 0
        noticed += alarms(shift, finishes(rng, 2.0, 3 * WINDOW)) > 0
    assert false == 0
    assert noticed >= 19


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
