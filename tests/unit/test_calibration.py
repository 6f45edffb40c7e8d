"""Calibration rows: their effect on a prediction, the row that counts, and values that they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtri

from qlm.api.v1 import estimator_pb2
from qlm_core.profiles.calibration import (
    HORIZONS,
    NOT_CALIBRATED,
    PRIOR_SCORE,
    UNCALIBRATED,
    CalibratedTime,
    CalibrationProfile,
    CalibrationTable,
)
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_estimator.calibration.conformal import ERRORS_MAX, ErrorQuantiles
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.outcomes.report import R2_SAMPLES_MIN, CalibrationRow, calibration_rows
from qlm_estimator.predictions import Judged, Predicted, depth_class, quantiles_of
from qlm_process.wire import profile as profile_wire

INSTANCE = InstanceFacts(name="a", incarnation="a/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=("m",))
SCORES = (*([0.1] * HORIZONS), *(0.5 + 0.1 * horizon for horizon in range(HORIZONS)), *([4.0] * HORIZONS))
ROW = CalibrationProfile(model="m", gpu="A100-80GB", n_gpu=1, instance="a", bias_factor=1.1, evidence_s=1e12, scores=SCORES, samples=3.0)


def test_a_row_moves_the_mean_and_has_its_own_quantiles() -> None:
    made = ROW.applied(Normal(100.0, 25.0))
    scale_s = math.sqrt(25.0 + 11.0**2 + 1.0)
    assert made.quantile(0.5) == pytest.approx(110.0 + 0.1 * scale_s)
    assert made.quantile(0.9) == pytest.approx(110.0 + 0.9 * scale_s), "110 s are of the horizon up to 256 s"
    assert ROW.p99_s(Normal(100.0, 25.0)) == pytest.approx(110.0 + 4.0 * scale_s)


def test_a_bias_counts_by_the_waits_of_the_same_length_that_show_it() -> None:
    """A hundred seconds are fifty short waits and a tenth of a long one; without any, and for no wait, there is no bias."""
    row = CalibrationProfile(bias_factor=2.0, evidence_s=100.0)
    levels = np.array([row.applied(Normal(mean, 0.0)).mean / mean for mean in (1.0, 99.0, 999.0)])
    assert levels == pytest.approx([1.0 + 50.0 / 51.0, 1.5, 1.0 + 0.1 / 1.1])
    assert CalibrationProfile(bias_factor=2.0).applied(Normal(50.0, 0.0)).mean == 50.0
    assert row.applied(Normal(0.0, 0.0)).mean == 0.0
    assert row.applied(Normal(-2.0, 0.0)).mean == pytest.approx(-4.0, rel=0.01), "a mean below zero takes the whole factor"


def test_without_a_row_a_prediction_stays_as_it_is() -> None:
    own = Normal(3.0, 4.0)
    assert UNCALIBRATED.applied(own) == own
    assert NOT_CALIBRATED.row(CalibratedTime.WAIT, "m", INSTANCE) is UNCALIBRATED


def test_the_narrowest_row_counts() -> None:
    wide = CalibrationProfile(bias_factor=2.0)
    model = CalibrationProfile(model="m", bias_factor=3.0)
    assert CalibrationTable((wide, model, ROW)).row(CalibratedTime.WAIT, "m", INSTANCE) is ROW
    assert CalibrationTable((wide, model)).row(CalibratedTime.WAIT, "m", INSTANCE) is model
    assert CalibrationTable((wide, model)).row(CalibratedTime.WAIT, "other", INSTANCE) is wide
    assert CalibrationTable((wide,)).row(CalibratedTime.COMPLETION, "m", INSTANCE) is UNCALIBRATED


@pytest.mark.parametrize(
    "figures",
    [
        {"bias_factor": 0.0},
        {"bias_factor": math.nan},
        {"samples": -1.0},
        {"evidence_s": math.inf},
        {"scores": (1.0,)},
        {"scores": (math.nan,) * len(SCORES)},
    ],
)
def test_figures_that_no_learner_writes_are_refused(figures: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="calibration"):
        CalibrationProfile(**figures)  # type: ignore[arg-type]


def test_two_rows_of_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match="own key"):
        CalibrationTable((ROW, ROW))


def test_rows_survive_the_wire() -> None:
    rows = (ROW, CalibrationProfile(time=CalibratedTime.COMPLETION, samples=4.5))
    snapshot = ProfileSnapshot(version=3, made_s=1.0, hardware=(), calibration=CalibrationTable(rows))
    assert profile_wire.from_body(profile_wire.to_body(snapshot)).calibration.rows == rows


def test_a_snapshot_of_before_calibration_has_no_rows() -> None:
    message = estimator_pb2.ProfileSnapshot(version=1, made_s=1.0)
    assert profile_wire.from_proto(message).calibration == NOT_CALIBRATED


# Quantiles of errors: as wide as what is known of them lets them be, and right in the long run ------------------------


def test_nothing_known_is_the_prior_and_nothing_is_infinite() -> None:
    fresh = ErrorQuantiles()
    assert fresh.quantiles() == pytest.approx((0.0, PRIOR_SCORE * 1.28, PRIOR_SCORE * 1.86), rel=0.2)
    fresh.add(-5.0, 1.0)
    assert np.isfinite(fresh.quantiles()).all()


def test_errors_of_one_wait_are_one_piece_of_evidence() -> None:
    """Sixteen predictions that wait behind the same requests all come true: that says as much as one of them."""
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
    published = before.quantiles()
    after = ErrorQuantiles.restored(published, 10.0)
    assert after.quantiles()[:2] == pytest.approx(published[:2], abs=0.3)
    assert ErrorQuantiles.restored(published, 0.0).quantiles() == ErrorQuantiles().quantiles()


# Coverage, bias and R2 of judged predictions, by depth ----------------------------------------------------------------


def judged(actual_s: float, p50_s: float, p90_s: float, *, ahead: int = 3, wait: bool = True) -> Judged:
    """The wait is a tenth of the completion, as predicted and as measured."""
    predicted = Predicted(
        queue_id="q",
        at_s=1.0,
        completion=quantiles_of(p50_s, p90_s),
        wait=quantiles_of(p50_s / 10.0, p90_s / 10.0) if wait else None,
        requests_ahead=ahead,
    )
    return Judged(predicted=predicted, at_s=1.0, completion_s=actual_s, wait_s=actual_s / 10.0)


def row_of(sample: list[Judged], time: CalibratedTime, depth: str = "") -> CalibrationRow:
    (row,) = (row for row in calibration_rows(sample) if (row.time, row.depth) == (time, depth))
    return row


def test_figures_of_four_predictions_by_hand() -> None:
    sample = [judged(actual_s, 2.0, 4.0) for actual_s in (1.0, 2.0, 3.0, 8.0)]
    row = row_of(sample, CalibratedTime.COMPLETION)
    assert (row.samples, row.within_p50, row.within_p90, row.bias_s) == (4, 0.5, 0.75, 1.5)
    assert row.r2 is None  # too few
    wait = row_of(sample, CalibratedTime.WAIT)
    assert wait.bias_s == pytest.approx(0.15)
    assert wait.within_p90 == 0.75


def test_true_quantiles_are_distinguished_from_wrong_ones() -> None:
    generator = np.random.default_rng(5)
    means = generator.uniform(10.0, 200.0, 2_000)
    actual = generator.normal(means, 0.1 * means)
    right: list[Judged] = []
    narrow: list[Judged] = []
    p90 = float(ndtri(0.9))
    for mean, actual_s in zip(means.tolist(), actual.tolist(), strict=True):
        right.append(judged(actual_s, mean, mean + p90 * 0.1 * mean))
        narrow.append(judged(actual_s, 0.8 * mean, 0.8 * mean + p90 * 0.05 * mean))
    good, bad = row_of(right, CalibratedTime.COMPLETION), row_of(narrow, CalibratedTime.COMPLETION)
    assert good.within_p50 == pytest.approx(0.5, abs=0.04)
    assert good.within_p90 == pytest.approx(0.9, abs=0.03)
    assert good.within_p99 == pytest.approx(0.99, abs=0.01)
    assert good.r2 is not None
    assert bad.r2 is not None
    assert good.r2 == pytest.approx(1.0 - float(np.square(actual - means).sum() / np.square(actual - actual.mean()).sum()))
    assert bad.within_p90 < 0.2
    assert bad.bias_s == pytest.approx(float((actual - 0.8 * means).mean()))
    assert bad.r2 < good.r2


def test_rows_are_of_all_then_by_depth_and_none_is_empty() -> None:
    assert calibration_rows([]) == ()
    sample = [judged(1.0, 1.0, 2.0, ahead=ahead, wait=ahead < 70) for ahead in (0, 5, 5, 70)]
    rows = [(row.time, row.depth, row.samples) for row in calibration_rows(sample)]
    wait, completion = CalibratedTime
    assert rows == [
        (wait, "", 3),
        (completion, "", 4),
        (wait, "0", 1),
        (completion, "0", 1),
        (wait, "16", 2),
        (completion, "16", 2),
        (completion, "256", 1),
    ]


def test_equal_answers_have_no_variance_to_explain() -> None:
    sample = [judged(5.0, 4.0, 6.0)] * (2 * R2_SAMPLES_MIN)
    assert row_of(sample, CalibratedTime.COMPLETION).r2 is None


@pytest.mark.parametrize(
    ("ahead", "depth"),
    [
        (-1, "0"), (0, "0"), (1, "1"), (2, "4"), (4, "4"), (5, "16"), (262_144, "262144"), (262_145, "262144+"), (10**18, "262144+"),
    ],
)  # fmt: skip
def test_depth_classes(ahead: int, depth: str) -> None:
    assert depth_class(ahead) == depth


def test_metrics_show_the_rows_and_no_others() -> None:
    metrics = EstimatorMetrics()
    sample = [judged(1.0 + 1.25 * number, 5.0, 8.0) for number in range(R2_SAMPLES_MIN)]
    metrics.report_calibration(calibration_rows(sample))
    value = metrics.registry.get_sample_value
    key = {"time": "completion", "depth": "4"}
    row = row_of(sample, CalibratedTime.COMPLETION, "4")
    assert value("qlm_estimator_calibration_samples", key) == R2_SAMPLES_MIN
    coverage = {"0.5": row.within_p50, "0.9": row.within_p90, "0.99": row.within_p99}
    assert len(set(coverage.values())) == 3
    for level in coverage:
        assert value("qlm_estimator_calibration_coverage_ratio", {**key, "level": level}) == coverage[level]
    assert value("qlm_estimator_calibration_bias_seconds", key) == row.bias_s
    assert value("qlm_estimator_calibration_r2_ratio", key) == row.r2
    metrics.report_calibration(())
    assert value("qlm_estimator_calibration_samples", key) is None
