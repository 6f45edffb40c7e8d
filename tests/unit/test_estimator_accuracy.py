"""Coverage, bias and R2 of judged predictions, by depth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.outcomes.report import R2_SAMPLES_MIN, CalibrationRow, PredictedTime, calibration_rows
from qlm_estimator.predictions import Judged, Predicted, depth_class, told


def judged(actual_s: float, p50_s: float, p90_s: float, *, ahead: int = 3, wait: bool = True) -> Judged:
    """The wait is a tenth of the completion, as told and as it came."""
    predicted = Predicted(
        queue_id="q",
        at_s=1.0,
        completion=told(p50_s, p90_s),
        wait=told(p50_s / 10.0, p90_s / 10.0) if wait else None,
        requests_ahead=ahead,
    )
    return Judged(predicted=predicted, at_s=1.0, completion_s=actual_s, wait_s=actual_s / 10.0)


def row_of(came: list[Judged], time: PredictedTime, depth: str = "") -> CalibrationRow:
    (row,) = (row for row in calibration_rows(came) if (row.time, row.depth) == (time, depth))
    return row


def test_figures_of_four_predictions_by_hand() -> None:
    came = [judged(actual_s, 2.0, 4.0) for actual_s in (1.0, 2.0, 3.0, 8.0)]
    row = row_of(came, PredictedTime.COMPLETION)
    assert (row.samples, row.within_p50, row.within_p90, row.bias_s) == (4, 0.5, 0.75, 1.5)
    assert row.r2 is None  # too few
    wait = row_of(came, PredictedTime.WAIT)
    assert wait.bias_s == pytest.approx(0.15)
    assert wait.within_p90 == 0.75


def test_true_quantiles_are_told_as_true_and_wrong_ones_as_wrong() -> None:
    generator = np.random.default_rng(5)
    means = generator.uniform(10.0, 200.0, 2_000)
    actual = generator.normal(means, 0.1 * means)
    right: list[Judged] = []
    narrow: list[Judged] = []
    for mean, actual_s in zip(means.tolist(), actual.tolist(), strict=True):
        right.append(judged(actual_s, mean, float(stats.norm(mean, 0.1 * mean).ppf(0.9))))
        narrow.append(judged(actual_s, 0.8 * mean, float(stats.norm(0.8 * mean, 0.05 * mean).ppf(0.9))))
    good, bad = row_of(right, PredictedTime.COMPLETION), row_of(narrow, PredictedTime.COMPLETION)
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
    came = [judged(1.0, 1.0, 2.0, ahead=ahead, wait=ahead < 70) for ahead in (0, 5, 5, 70)]
    rows = [(row.time, row.depth, row.samples) for row in calibration_rows(came)]
    wait, completion = PredictedTime
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
    came = [judged(5.0, 4.0, 6.0)] * (2 * R2_SAMPLES_MIN)
    assert row_of(came, PredictedTime.COMPLETION).r2 is None


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
    came = [judged(1.0 + 1.25 * number, 5.0, 8.0) for number in range(R2_SAMPLES_MIN)]
    metrics.report_calibration(calibration_rows(came))
    value = metrics.registry.get_sample_value
    key = {"time": "completion", "depth": "4"}
    row = row_of(came, PredictedTime.COMPLETION, "4")
    assert value("qlm_estimator_calibration_samples", key) == R2_SAMPLES_MIN
    coverage = {"0.5": row.within_p50, "0.9": row.within_p90, "0.99": row.within_p99}
    assert len(set(coverage.values())) == 3
    for level in coverage:
        assert value("qlm_estimator_calibration_coverage_ratio", {**key, "level": level}) == coverage[level]
    assert value("qlm_estimator_calibration_bias_seconds", key) == row.bias_s
    assert value("qlm_estimator_calibration_r2_ratio", key) == row.r2
    metrics.report_calibration(())
    assert value("qlm_estimator_calibration_samples", key) is None
