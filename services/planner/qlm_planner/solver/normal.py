"""The normal distribution by table: P(Z <= z) and E[(Z + z)+], cubic between points, to within 1e-8. Twice as fast as erfc and exp."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from qlm_planner.solver.compiled import lean

Z_MAX = 6.0
"""Beyond this the normal is a step."""
POINTS_PER_UNIT = 32
_STEP = 1.0 / POINTS_PER_UNIT

_Z = np.arange(-Z_MAX, Z_MAX + 1.5 * _STEP, _STEP)
_DENSITY = np.exp(-0.5 * _Z * _Z) / math.sqrt(2.0 * math.pi)
_VALUES = np.stack((ndtr(_Z), _DENSITY + _Z * ndtr(_Z)))
_SLOPES = np.stack((_DENSITY, ndtr(_Z))) * _STEP
_RISES = np.diff(_VALUES)
_CUBICS = np.ascontiguousarray(
    np.concatenate(
        [
            (low, slope, 3.0 * rise - 2.0 * slope - slope_behind, slope + slope_behind - 2.0 * rise)
            for low, rise, slope, slope_behind in zip(_VALUES[:, :-1], _RISES, _SLOPES[:, :-1], _SLOPES[:, 1:], strict=True)
        ]
    ).T
)
"""From each point to the next, of both functions: the cubic with their values and slopes at both ends (Hermite), lowest power first."""
_Z_LAST = Z_MAX - 1e-9


@lean
def probability_and_excess(z: float) -> tuple[float, float]:
    """P(Z <= z) and E[(Z + z)+] = phi(z) + z Phi(z). Without branches: which of them a processor will go cannot be foretold here."""
    near = min(max(z, -Z_MAX), _Z_LAST)
    place = (near + Z_MAX) * POINTS_PER_UNIT
    at = np.uint64(place)
    t = place - at
    row = _CUBICS[at]
    probability = row[0] + t * (row[1] + t * (row[2] + t * row[3]))
    excess = row[4] + t * (row[5] + t * (row[6] + t * row[7]))
    return probability, excess + max(z - near, 0.0)
