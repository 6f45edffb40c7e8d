"""Calibration rows: what they make of a prediction, which of them counts, and what they refuse."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm.api.v1 import estimator_pb2
from qlm_core.calibration import NOT_CALIBRATED, UNCALIBRATED, CalibratedTime, CalibrationProfile, CalibrationTable
from qlm_core.distribution import Normal
from qlm_core.instance import InstanceFacts
from qlm_core.profile import ProfileSnapshot
from qlm_process import profile_wire

INSTANCE = InstanceFacts(name="a", incarnation="a/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=("m",))
ROW = CalibrationProfile(
    model="m", gpu="A100-80GB", n_gpu=1, instance="a", bias_factor=1.1, offset_s=2.0, variance_factor=2.0, relative_variance=0.01
)


def test_a_row_moves_the_mean_and_adds_what_grows_with_it() -> None:
    made = ROW.applied(Normal(100.0, 25.0))
    assert made.mean == pytest.approx(112.0)
    assert made.variance == pytest.approx(50.0 + 0.01 * 112.0**2)


def test_without_a_row_a_prediction_stays_as_it_is() -> None:
    own = Normal(3.0, 4.0)
    assert UNCALIBRATED.applied(own) == own
    assert NOT_CALIBRATED.row(CalibratedTime.WAIT, "m", INSTANCE) is UNCALIBRATED


def test_the_narrowest_row_counts() -> None:
    wide = CalibrationProfile(bias_factor=2.0)
    model = CalibrationProfile(model="m", bias_factor=3.0)
    pair = CalibrationProfile(model="m", gpu="A100-80GB", n_gpu=1, bias_factor=4.0)
    assert CalibrationTable((wide, model, pair, ROW)).row(CalibratedTime.WAIT, "m", INSTANCE) is ROW
    assert CalibrationTable((wide, model, pair)).row(CalibratedTime.WAIT, "m", INSTANCE) is pair
    assert CalibrationTable((wide, model)).row(CalibratedTime.WAIT, "m", INSTANCE) is model
    assert CalibrationTable((wide, model)).row(CalibratedTime.WAIT, "other", INSTANCE) is wide
    assert CalibrationTable((wide,)).row(CalibratedTime.COMPLETION, "m", INSTANCE) is UNCALIBRATED


@pytest.mark.parametrize(
    "figures",
    [{"bias_factor": 0.0}, {"bias_factor": math.nan}, {"offset_s": math.inf}, {"variance_factor": -1.0}, {"relative_variance": math.nan}],
)
def test_figures_that_no_learner_writes_are_refused(figures: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="calibration"):
        CalibrationProfile(**figures)  # type: ignore[arg-type]


def test_two_rows_of_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match="own key"):
        CalibrationTable((ROW, ROW))


@given(
    mean=st.floats(0.0, 1e5),
    variance=st.floats(0.0, 1e8),
    factor=st.floats(0.5, 2.0),
    offset=st.floats(-100.0, 100.0),
    relative=st.floats(0.0, 1.0),
    more=st.floats(0.0, 1e4),
)
def test_a_longer_prediction_stays_longer_and_no_less_certain(
    mean: float, variance: float, factor: float, offset: float, relative: float, more: float
) -> None:
    row = CalibrationProfile(bias_factor=factor, offset_s=offset, relative_variance=relative)
    shorter, longer = row.applied(Normal(mean, variance)), row.applied(Normal(mean + more, variance))
    assert longer.mean >= shorter.mean
    assert longer.variance >= shorter.variance * (1.0 - 1e-12)


def test_rows_survive_the_wire() -> None:
    rows = (ROW, CalibrationProfile(time=CalibratedTime.COMPLETION, base_variance_s2=3.0, samples=4.5))
    snapshot = ProfileSnapshot(version=3, made_s=1.0, hardware=(), calibration=CalibrationTable(rows))
    assert profile_wire.from_body(profile_wire.to_body(snapshot)).calibration.rows == rows


def test_a_snapshot_of_before_calibration_has_no_rows() -> None:
    message = estimator_pb2.ProfileSnapshot(version=1, made_s=1.0)
    assert profile_wire.from_proto(message).calibration == NOT_CALIBRATED
