"""Calibration of many predictions at once: what `CalibrationProfile.applied` says of one."""

from __future__ import annotations

import numpy as np

from qlm_core.calibration import CalibrationProfile
from qlm_core.normal_arrays import Floats

Figures = tuple[float, float, float, float, float]
"""Of a calibration row, as `calibrated` takes them."""

FIGURES = 5


def figures_of(row: CalibrationProfile) -> Figures:
    return (row.bias_factor, row.variance_factor, row.relative_variance, row.base_variance_s2, row.offset_s)


def calibrated(figures: Floats, mean: Floats, variance: Floats) -> tuple[Floats, Floats]:
    """Means and variances [..., predictions] by the figures [FIGURES, predictions] of each."""
    found = figures[0] * mean + figures[4]
    return found, figures[3] + figures[1] * variance + figures[2] * np.square(np.maximum(found, 0.0))
