"""What the outputs of all classes of a model have in common."""

from __future__ import annotations

import numpy as np
import pytest

from qlm_estimator.length_level import LengthLevel, deviation
from qlm_estimator.lengths import LengthLearner


def level_after(deviations: list[float]) -> float:
    level = LengthLevel()
    for each in deviations:
        level.add(each)
    return level.factor


def test_a_common_drift_is_followed_and_noise_is_not() -> None:
    rng = np.random.default_rng(1)
    assert level_after([]) == 1.0
    assert 1.03 < level_after((0.1 + rng.normal(0.0, 0.5, 1_500)).tolist()) < 1.11
    assert level_after((0.1 + rng.normal(0.0, 0.5, 20)).tolist()) == pytest.approx(1.0, abs=0.02)
    assert level_after(rng.normal(0.0, 1.0, 1_500).tolist()) == pytest.approx(1.0, abs=0.03)


def test_one_output_is_bounded() -> None:
    assert deviation(1e9, 4.0) == -deviation(1.0, 9.0) == 1.5


def test_a_rare_class_follows_what_the_common_one_shows() -> None:
    """Both become half as long again; of the rare one nothing has finished since."""
    rng = np.random.default_rng(1)
    learner = LengthLearner(memory=1_000.0, rows_max=100)

    def finish(tokens: str, mean: float) -> None:
        learner.finish(learner.classes("chat", "", tokens), 100, max(1, round(mean * rng.lognormal(0.0, 0.3))))

    def mean_of(tokens: str) -> float:
        return next(row.output_tokens_mean for row in learner.profiles() if row.token_class == tokens)

    for _ in range(1_000):
        finish("256/o64", 100.0)
        finish("1024/o1024", 400.0)
    before = mean_of("1024/o1024")
    for _ in range(600):
        finish("256/o64", 130.0)
    finish("1024/o1024", 400.0)
    assert mean_of("1024/o1024") > 1.04 * before
    learner.forget("chat", 5.0)
    finish("1024/o1024", 400.0)
    assert mean_of("1024/o1024") == pytest.approx(before, rel=0.1)
