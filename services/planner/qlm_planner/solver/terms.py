"""All that large moves have to know of a group on a kind of instances, in one row: what `cost` works out at every step as far as it is the
same wherever the group stands."""

from __future__ import annotations

import math

import numpy as np

from qlm_planner.solver.compiled import lean
from qlm_planner.solver.cost import FIRST_SHARE, POINTS, STEP_SHARE, VARIANCE_MIN, Z_MAX_SQUARED
from qlm_planner.solver.normal import unbranched
from qlm_planner.solver.packing import (
    COMPLETION,
    DEADLINE,
    DRAIN,
    LATE,
    OWN,
    OWN_VARIANCE,
    REQUESTS,
    SPREAD,
    STARVES,
    STARVING,
    TARDINESS,
    WORK,
    WORK_VARIANCE,
    Packed,
)
from qlm_planner.solver.problem import Floats

(
    T_WORK,
    T_WORK_VARIANCE,
    T_OWN_VARIANCE,
    T_DRAIN,
    T_FIRST,
    T_STRETCH,
    T_LOW,
    T_HIGH,
    T_MIDDLE,
    T_DONE,
    T_STARVES,
    T_LATE,
    T_TARDY,
    T_COMPLETION,
    T_STARVING,
) = range(15)
"""Columns. Seconds beyond the start of the group's first request: how late its first point ends, its least late and its latest one, and
their mean (negative: in time); completion in the mean; how long its last request starves. `STRETCH`: of the last request beyond the
first one. Costs: of a late point, of a second that a point is late, of a second until completion, of a second of starving."""
COLUMNS = 16


def terms_of(packed: Packed) -> Floats:
    """[K, G, 16]: two cache lines a row."""
    on, group, weights = packed.on_kind, packed.group, packed.weights
    terms = np.zeros((*packed.serves.shape, COLUMNS))
    due = on[..., OWN] - group[:, DEADLINE]
    stretch = on[..., WORK] - group[:, SPREAD]
    first, last = due + FIRST_SHARE * stretch, due + (1.0 - FIRST_SHARE) * stretch
    terms[..., T_WORK], terms[..., T_WORK_VARIANCE] = on[..., WORK], on[..., WORK_VARIANCE]
    terms[..., T_OWN_VARIANCE], terms[..., T_DRAIN] = on[..., OWN_VARIANCE], on[..., DRAIN]
    terms[..., T_FIRST], terms[..., T_STRETCH] = first, stretch
    terms[..., T_LOW], terms[..., T_HIGH] = np.minimum(first, last), np.maximum(first, last)
    terms[..., T_MIDDLE] = due + 0.5 * stretch
    terms[..., T_DONE] = on[..., OWN] + 0.5 * on[..., WORK]
    terms[..., T_STARVES] = on[..., OWN] + on[..., WORK] - group[:, STARVES]
    terms[..., T_LATE] = group[:, REQUESTS] * weights[LATE] / POINTS
    terms[..., T_TARDY] = group[:, REQUESTS] * weights[TARDINESS] / POINTS
    terms[..., T_COMPLETION] = group[:, REQUESTS] * weights[COMPLETION]
    terms[..., T_STARVING] = group[:, STARVING]
    return terms


@lean
def lateness_cost(
    low_s: float, high_s: float, first_s: float, stretch_s: float, variance: float, work_variance: float, late: float, tardy: float
) -> tuple[float, float]:
    """What late requests and tardiness of a group cost, and what a second later costs more in tardiness: `cost.lateness` of the columns of
    these names, with the start added, and with the variance of the first end. Numbers alone: a row is handed over as seven."""
    spread = Z_MAX_SQUARED * max(variance + work_variance, VARIANCE_MIN)
    if high_s < 0.0 and high_s * high_s > spread:
        return 0.0, 0.0
    if low_s > 0.0 and low_s * low_s > spread:
        return POINTS * (late + 0.5 * tardy * (low_s + high_s)), POINTS * tardy
    step_s, step = STEP_SHARE * stretch_s, STEP_SHARE * work_variance
    variance += FIRST_SHARE * work_variance
    one, one_s = _point(first_s, variance)
    two, two_s = _point(first_s + step_s, variance + step)
    three, three_s = _point(first_s + 2.0 * step_s, variance + 2.0 * step)
    four, four_s = _point(first_s + 3.0 * step_s, variance + 3.0 * step)
    points = (one + two) + (three + four)
    return late * points + tardy * ((one_s + two_s) + (three_s + four_s)), tardy * points


@lean
def _point(gap_s: float, variance: float) -> tuple[float, float]:
    deviation = math.sqrt(max(variance, VARIANCE_MIN))
    probability, excess = unbranched(gap_s / deviation)
    return probability, deviation * excess
