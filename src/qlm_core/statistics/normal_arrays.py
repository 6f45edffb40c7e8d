"""Normals as arrays of means and variances: what `qlm_core.statistics.distribution.Normal` says of one, said of many."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Floats = NDArray[np.float64]

FAR_DEVIATIONS = 8.0
"""From a bound that is further away a normal is taken to be on one side of it: the error is below 1e-15 of a deviation."""

_INVERSE_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


def density(z: Floats) -> Floats:
    found: Floats = _INVERSE_SQRT_2PI * np.exp(-0.5 * z * z)
    return found


def floored(mean: Floats, variance: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of max(0, X) of each. Only those within `FAR_DEVIATIONS` of 0 cost more than a comparison."""
    found_mean = np.maximum(mean, 0.0)
    found_variance = variance * (mean > 0.0)
    near = mean * mean < FAR_DEVIATIONS**2 * variance
    if near.any():
        own_mean, own_variance = mean[near], variance[near]
        deviation = np.sqrt(own_variance)
        z = own_mean / deviation
        above, dense = ndtr(z), density(z)
        first = np.maximum(np.maximum(z, 0.0), z * above + dense)
        second = (z * z + 1.0) * above + z * dense
        found_mean[near] = deviation * first
        found_variance[near] = own_variance * np.clip(second - first * first, 0.0, 1.0)
    return found_mean, found_variance
