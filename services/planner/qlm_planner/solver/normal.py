"""The normal distribution by table: P(Z <= z) and E[(Z + z)+], cubic between points, to within 1e-8. Twice as fast as erfc and exp."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from qlm_planner.solver.compiled import lean

Z_MAX = 6.0
"""Beyond this the normal is a step."""
POINTS_PER_UNIT = 32
_STEP = 1.0 / POINTS_PER_UNIT

_Z = np.arange(-Z_MAX, Z_MAX + 1.5 * _STEP, _STEP)
_DENSITY = np.exp(-0.5 * _Z * _Z) / math.sqrt(2.0 * math.pi)
_TABLE = np.ascontiguousarray(np.stack((ndtr(_Z), _DENSITY * _STEP, _DENSITY + _Z * ndtr(_Z), ndtr(_Z) * _STEP), axis=1))
"""At each point: both functions, and their slopes over one step."""


@lean
def probability_and_excess(z: float) -> tuple[float, float]:
    """P(Z <= z) and E[(Z + z)+] = phi(z) + z Phi(z)."""
    if z <= -Z_MAX:
        return 0.0, 0.0
    if z >= Z_MAX:
        return 1.0, z
    place = (z + Z_MAX) * POINTS_PER_UNIT
    at = int(place)
    t = place - at
    # The cubic with these values and slopes at both ends (Hermite).
    later = t * t * (3.0 - 2.0 * t)
    leave = t * (1.0 - t) * (1.0 - t)
    reach = t * t * (t - 1.0)
    probability = _TABLE[at, 0] + later * (_TABLE[at + 1, 0] - _TABLE[at, 0]) + leave * _TABLE[at, 1] + reach * _TABLE[at + 1, 1]
    excess = _TABLE[at, 2] + later * (_TABLE[at + 1, 2] - _TABLE[at, 2]) + leave * _TABLE[at, 3] + reach * _TABLE[at + 1, 3]
    return probability, excess


def _cubics() -> NDArray[np.float64]:
    (low, slope, low_excess, slope_excess), (high, slope_behind, high_excess, slope_excess_behind) = _TABLE[:-1].T, _TABLE[1:].T
    rows = []
    for value, rise, leaves, reaches in (
        (low, high - low, slope, slope_behind),
        (low_excess, high_excess - low_excess, slope_excess, slope_excess_behind),
    ):
        rows += [value, leaves, 3.0 * rise - 2.0 * leaves - reaches, leaves + reaches - 2.0 * rise]
    return np.ascontiguousarray(np.stack(rows, axis=1))


_CUBICS = _cubics()
"""From each point of the table to the next, of both functions: the same cubic, lowest power first."""
_Z_LAST = Z_MAX - 1e-9


@lean
def unbranched(z: float) -> tuple[float, float]:
    """`probability_and_excess` for where it is worked out at several points in a row: which branch a processor will go it cannot foretell
    there."""
    near = min(max(z, -Z_MAX), _Z_LAST)
    place = (near + Z_MAX) * POINTS_PER_UNIT
    at = np.uint64(place)
    t = place - at
    row = _CUBICS[at]
    probability = row[0] + t * (row[1] + t * (row[2] + t * row[3]))
    excess = row[4] + t * (row[5] + t * (row[6] + t * row[7]))
    return probability, excess + max(z - near, 0.0)
