"""Calibration rows: what they make of a prediction, which of them counts, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qlm.api.v1 import estimator_pb2
from qlm_core.calibration import (
    HORIZONS,
    NOT_CALIBRATED,
    UNCALIBRATED,
    CalibratedTime,
    CalibrationProfile,
    CalibrationTable,
    calibrated,
)
from qlm_core.distribution import Normal
from qlm_core.instance import InstanceFacts
from qlm_core.profile import ProfileSnapshot
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


def test_many_predictions_are_moved_as_one_is() -> None:
    means, variances = np.geomspace(0.01, 1e5, 40), np.linspace(0.0, 100.0, 40)
    figures = np.repeat(ROW.figures[:, None], 40, axis=1)
    found = np.array(calibrated(figures, means, variances))
    alone = [ROW.applied(Normal(mean, variance)) for mean, variance in zip(means.tolist(), variances.tolist(), strict=True)]
    assert found.T.tolist() == [[each.mean, each.variance] for each in alone]
    rows = np.array(calibrated(figures, np.tile(means, (3, 1)), np.tile(variances, (3, 1))))
    assert (rows == found[:, None]).all()


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
