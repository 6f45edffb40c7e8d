"""Coverage, bias, R2 and pinball loss of judged predictions, by model, GPU and depth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.outcomes.accuracy import (
    KEYS_MAX,
    OTHER,
    R2_SAMPLES_MIN,
    UNKNOWN,
    CalibrationRow,
    PredictedTime,
    calibration_rows,
)
from qlm_estimator.predictions import Judged, Predicted, depth_class, gpu_label, told


def judged(
    actual_s: float, p50_s: float, p90_s: float, *, at_s: float = 1.0, model: str = "m", gpu: str = "A", ahead: int = 3, wait: bool = True
) -> Judged:
    """The wait is a tenth of the completion, as told and as it came."""
    predicted = Predicted(
        queue_id="q",
        at_s=at_s,
        completion=told(p50_s, p90_s),
        wait=told(p50_s / 10.0, p90_s / 10.0) if wait else None,
        model=model,
        gpu=gpu,
        n_gpu=1,
        requests_ahead=ahead,
    )
    return Judged(predicted=predicted, at_s=at_s, completion_s=actual_s, wait_s=actual_s / 10.0)


def row_of(came: list[Judged], time: PredictedTime, model: str = "", gpu: str = "", depth: str = "") -> CalibrationRow:
    (row,) = (row for row in calibration_rows(came) if (row.time, row.model, row.gpu, row.depth) == (time, model, gpu, depth))
    return row


def test_figures_of_four_predictions_by_hand() -> None:
    came = [judged(actual_s, 2.0, 4.0) for actual_s in (1.0, 2.0, 3.0, 8.0)]
    row = row_of(came, PredictedTime.COMPLETION)
    assert (row.samples, row.within_p50, row.within_p90, row.bias_s, row.actual_mean_s) == (4, 0.5, 0.75, 1.5, 3.5)
    assert row.pinball_p50_s == pytest.approx(0.5 * (1 + 0 + 1 + 6) / 4)
    assert row.pinball_p90_s == pytest.approx((0.1 * 3 + 0.1 * 2 + 0.1 * 1 + 0.9 * 4) / 4)
    p99_s = 2.0 + 2.0 * stats.norm.ppf(0.99) / stats.norm.ppf(0.9)
    assert row.pinball_p99_s == pytest.approx((0.01 * (3 * p99_s - 6.0) + 0.99 * (8.0 - p99_s)) / 4)
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
    assert good.pinball_p90_s < bad.pinball_p90_s


def test_rows_are_sums_then_keys_and_none_is_empty() -> None:
    came: list[Judged] = []
    assert calibration_rows(came) == ()
    for model, gpu, ahead in (("a", "A", 0), ("a", "A", 5), ("b", "A", 5), ("b", "H", 70)):
        came.append(judged(1.0, 1.0, 2.0, model=model, gpu=gpu, ahead=ahead, wait=model == "a"))
    completions = [(row.model, row.gpu, row.depth, row.samples) for row in calibration_rows(came) if row.time is PredictedTime.COMPLETION]
    assert completions == [
        ("", "", "", 4),
        ("", "", "0", 1),
        ("", "", "16", 2),
        ("", "", "256", 1),
        ("a", "A", "", 2),
        ("b", "A", "", 1),
        ("b", "H", "", 1),
        ("a", "A", "0", 1),
        ("a", "A", "16", 1),
        ("b", "A", "16", 1),
        ("b", "H", "256", 1),
    ]
    waits = [(row.model, row.depth, row.samples) for row in calibration_rows(came) if row.time is PredictedTime.WAIT]
    assert waits == [("", "", 2), ("", "0", 1), ("", "16", 1), ("a", "", 2), ("a", "0", 1), ("a", "16", 1)]


def test_what_does_not_tell_its_model_is_not_taken_for_any() -> None:
    came: list[Judged] = []
    came.append(judged(1.0, 1.0, 2.0, model="", gpu=""))
    assert {(row.model, row.gpu) for row in calibration_rows(came)} == {("", ""), (UNKNOWN, UNKNOWN)}


def test_keys_are_bounded_and_those_with_the_most_predictions_told_apart() -> None:
    came = [judged(1.0, 1.0, 2.0, model=f"m{number}") for number in range(2 * KEYS_MAX)]
    came += [judged(1.0, 1.0, 2.0, model=f"m{number}") for number in range(KEYS_MAX, 2 * KEYS_MAX)]
    names = {row.model for row in calibration_rows(came)}
    assert names == {"", OTHER, *(f"m{number}" for number in range(KEYS_MAX, 2 * KEYS_MAX))}
    assert row_of(came, PredictedTime.COMPLETION, OTHER, OTHER).samples == KEYS_MAX
    assert row_of(came, PredictedTime.COMPLETION).samples == 3 * KEYS_MAX


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


def test_gpu_labels() -> None:
    assert [gpu_label("H100", n_gpu) for n_gpu in (0, 1, 4)] == ["H100", "H100", "4x H100"]
    assert gpu_label("", 4) == ""


def test_metrics_show_the_rows_and_no_others() -> None:
    metrics = EstimatorMetrics()
    came = [judged(1.0 + 1.25 * number, 5.0, 8.0) for number in range(R2_SAMPLES_MIN)]
    metrics.report_calibration(calibration_rows(came))
    value = metrics.registry.get_sample_value
    key = {"time": "completion", "model": "m", "gpu": "A", "depth": "4"}
    row = row_of(came, PredictedTime.COMPLETION, "m", "A", "4")
    assert value("qlm_estimator_calibration_samples", key) == R2_SAMPLES_MIN
    coverage = {"0.5": row.within_p50, "0.9": row.within_p90, "0.99": row.within_p99}
    pinball_s = {"0.5": row.pinball_p50_s, "0.9": row.pinball_p90_s, "0.99": row.pinball_p99_s}
    assert len(set(coverage.values())) == len(set(pinball_s.values())) == 3
    for level in coverage:
        assert value("qlm_estimator_calibration_coverage_ratio", {**key, "level": level}) == coverage[level]
        assert value("qlm_estimator_calibration_pinball_seconds", {**key, "level": level}) == pinball_s[level]
    assert value("qlm_estimator_calibration_bias_seconds", key) == row.bias_s
    assert value("qlm_estimator_calibration_r2_ratio", key) == row.r2
    metrics.report_calibration(())
    assert value("qlm_estimator_calibration_samples", key) is None
