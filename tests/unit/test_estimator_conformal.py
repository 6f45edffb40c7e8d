"""Quantiles of errors: as wide as what is known of them lets them be, and right in the long run."""

from __future__ import annotations

import numpy as np
import pytest

from qlm_core.calibration import PRIOR_SCORE
from qlm_estimator.calibration.conformal import ERRORS_MAX, ErrorQuantiles


def test_nothing_known_is_the_prior_and_nothing_is_infinite() -> None:
    fresh = ErrorQuantiles()
    assert fresh.quantiles() == pytest.approx((0.0, PRIOR_SCORE * 1.28, PRIOR_SCORE * 1.86), rel=0.2)
    fresh.add(-5.0, 1.0)
    assert np.isfinite(fresh.quantiles()).all()


def test_errors_of_one_wait_are_one_piece_of_evidence() -> None:
    """Sixteen predictions that wait behind the same requests all come as told: that says as much as one of them."""
    one, sixteen, independent = ErrorQuantiles(), ErrorQuantiles(), ErrorQuantiles()
    one.add(0.0, 1.0)
    for _ in range(16):
        sixteen.add(0.0, 1.0 / 16)
        independent.add(0.0, 1.0)
    assert sixteen.quantiles() == one.quantiles()
    assert sixteen.quantiles()[1] > 1.0 > independent.quantiles()[1]


@pytest.mark.parametrize("together", [1, 16])
def test_ninety_percent_come_within_p90_from_the_fifth_wait_on(together: int) -> None:
    """Errors come in waves, each as wide as any: alike for all that wait together."""
    within: list[bool] = []
    for seed in range(40):
        errors = ErrorQuantiles()
        for wave, error in enumerate(np.random.default_rng(seed).normal(0.0, 0.3, 30).tolist()):
            if wave >= 5:
                within.append(error <= errors.quantiles()[1])
            for _ in range(together):
                errors.add(error, 1.0 / together)
    assert np.mean(within) == pytest.approx(0.91, abs=0.03)


def test_misses_widen_and_hits_narrow_and_only_the_last_errors_count() -> None:
    missed, met = ErrorQuantiles(), ErrorQuantiles()
    for error in np.linspace(-1.0, 1.0, 64).tolist():
        for each in (missed, met):
            each.add(error, 1.0)
    before = met.quantiles()[1]
    for _ in range(30):
        missed.learn(1, True, 2.0, outstanding=0)
        met.learn(1, False, 0.0, outstanding=0)
    assert missed.quantiles()[1] > before > met.quantiles()[1]
    for _ in range(ERRORS_MAX):
        met.add(0.0, 1.0)
    assert met.quantiles()[1] == 0.0


def test_what_was_published_is_gone_on_with() -> None:
    before = ErrorQuantiles()
    for error in np.random.default_rng(3).normal(0.0, 0.5, 60).tolist():
        before.add(error, 1.0)
    told = before.quantiles()
    after = ErrorQuantiles.restored(told, 10.0)
    assert after.quantiles()[:2] == pytest.approx(told[:2], abs=0.3)
    assert ErrorQuantiles.restored(told, 0.0).quantiles() == ErrorQuantiles().quantiles()
