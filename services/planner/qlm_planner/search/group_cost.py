"""The cost of a group at its position (design, "The planner"), and the opening of a queue. Compiled.

Lateness is computed at four points of a group.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from qlm_planner.cost.order_cost import FAR_S, VARIANCE_MIN
from qlm_planner.search import packing
from qlm_planner.search.compile_cache import lean
from qlm_planner.search.packing import Packed

Z_MAX = 6.0
"""Beyond this the normal distribution is a step."""
POINTS_PER_UNIT = 32
_STEP = 1.0 / POINTS_PER_UNIT

_Z = np.arange(-Z_MAX, Z_MAX + 1.5 * _STEP, _STEP)
_DENSITY = np.exp(-0.5 * _Z * _Z) / math.sqrt(2.0 * math.pi)
_TABLE = np.ascontiguousarray(np.stack((ndtr(_Z), _DENSITY * _STEP, _DENSITY + _Z * ndtr(_Z), ndtr(_Z) * _STEP), axis=1))
"""At each point: both functions, and their slopes per step."""
FIRST_SHARE = 0.125
STEP_SHARE = 0.25
POINTS = 4
"""Points of a group at which lateness is computed, each for a quarter of its requests."""
Z_MAX_SQUARED = Z_MAX * Z_MAX


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
    # Cubic Hermite interpolation.
    later = t * t * (3.0 - 2.0 * t)
    leave = t * (1.0 - t) * (1.0 - t)
    reach = t * t * (t - 1.0)
    probability = _TABLE[at, 0] + later * (_TABLE[at + 1, 0] - _TABLE[at, 0]) + leave * _TABLE[at, 1] + reach * _TABLE[at + 1, 1]
    excess = _TABLE[at, 2] + later * (_TABLE[at + 1, 2] - _TABLE[at, 2]) + leave * _TABLE[at, 3] + reach * _TABLE[at + 1, 3]
    return probability, excess


@lean
def lateness(gap_s: float, stretch_s: float, variance: float, work_variance: float) -> tuple[float, float]:
    """P(late) and expected tardiness of a request, averaged over the points of its group. `gap_s`: end less deadline of the first request;
    `stretch_s`: its growth to the last one; `variance`: of the first end, `work_variance`: its growth to the last one."""
    first = gap_s + FIRST_SHARE * stretch_s
    last = gap_s + (1.0 - FIRST_SHARE) * stretch_s
    spread = Z_MAX_SQUARED * max(variance + work_variance, VARIANCE_MIN)
    high = max(first, last)
    if high < 0.0 and high * high > spread:
        return 0.0, 0.0
    low = min(first, last)
    if low > 0.0 and low * low > spread:
        return 1.0, 0.5 * (first + last)
    late, tardiness = 0.0, 0.0
    share = FIRST_SHARE
    for _ in range(POINTS):
        deviation = math.sqrt(max(variance + share * work_variance, VARIANCE_MIN))
        probability, excess = probability_and_excess((gap_s + share * stretch_s) / deviation)
        late += probability
        tardiness += deviation * excess
        share += STEP_SHARE
    return late / POINTS, tardiness / POINTS


@lean
def cost_from(packed: Packed, kind: int, group: int, start_s: float, variance: float) -> float:
    """The cost of a group on a kind with a start."""
    on_kind, row, weights = packed.on_kind[kind, group], packed.group[group], packed.weights
    reached_s, work_s = start_s + on_kind[packing.OWN], on_kind[packing.WORK]
    gap_s = reached_s - row[packing.DEADLINE]
    late, tardiness_s = lateness(
        gap_s, work_s - row[packing.SPREAD], variance + on_kind[packing.OWN_VARIANCE], on_kind[packing.WORK_VARIANCE]
    )
    each = (
        weights[packing.LATE] * late + weights[packing.TARDINESS] * tardiness_s + weights[packing.COMPLETION] * (reached_s + 0.5 * work_s)
    )
    return float(row[packing.REQUESTS] * each)


@lean
def opening(packed: Packed, queue: int, group: int) -> tuple[float, float, float, float, float, bool]:
    """Costs the first group of a queue: its start and the variance; the begin of its run (for the next swap); the end of the running batch;
    the seconds of swapping; whether the batch is evicted, which it is where the group gains more than the eviction costs. (Agents refuse it
    for a more urgent batch.)"""
    row, model = packed.queue[queue], packed.model[group]
    busy_s = row[packing.DRAIN_LEAD]
    if model == packed.active[queue]:
        return row[packing.LEAD], row[packing.LEAD_VARIANCE], 0.0, busy_s, 0.0, False
    kind = packed.kind[queue]
    warm, swap = packed.warm[kind, model], packed.swap[queue, model]
    behind_s = busy_s + max(warm, swap - busy_s)
    cleared_s, behind_variance = max(warm, swap), row[packing.DRAIN_LEAD_VARIANCE]
    if cleared_s < behind_s and row[packing.CLEAR_COST] < FAR_S:
        dearer = packed.weights[packing.WORK_WEIGHT] * (cleared_s - (behind_s - busy_s)) + row[packing.CLEAR_COST]
        saved = cost_from(packed, kind, group, behind_s, behind_variance) - cost_from(packed, kind, group, cleared_s, 0.0)
        if saved > dearer:
            return cleared_s, 0.0, cleared_s, 0.0, cleared_s, True
    return behind_s, behind_variance, behind_s, busy_s, behind_s - busy_s, False


@lean
def front_cost(packed: Packed, queue: int, group: int, swap_s: float, evicts: bool) -> float:
    """The cost of opening a queue with a group, without the group's own. The first load of an empty engine delays no request."""
    cost = 0.0
    if packed.active[queue] >= 0:
        cost += packed.weights[packing.WORK_WEIGHT] * swap_s
    if evicts:
        cost += packed.queue[queue, packing.CLEAR_COST]
    if packed.model[group] != packed.active[queue]:
        cost += packed.queue[queue, packing.LEAVE_COST]
    return cost
