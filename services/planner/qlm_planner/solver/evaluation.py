"""What orders cost, in parts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.compiled import lean
from qlm_planner.solver.cost import displaces, empty_cost, lateness, opening
from qlm_planner.solver.packing import (
    CLEAR_COST,
    COMPLETION,
    DEADLINE,
    DRAIN,
    HEAD_GAIN,
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
    WORK_WEIGHT,
    Packed,
)
from qlm_planner.solver.problem import Costs, Floats, Integers

(SUM_LATE, SUM_TARDINESS, SUM_SWAP, SWAPS, REDO, DISPLACED, STARVATION, SUM_COMPLETION, TOTAL) = range(9)
(LATE_SHARE, OVER) = range(2)


@lean
def _evaluate(packed: Packed, first: NDArray[np.int64], groups: Integers, sums: Floats, each: Floats) -> None:
    weights = packed.weights
    for queue in range(len(first) - 1):
        before = -1
        start_s, variance, run_s, busy_s = 0.0, 0.0, 0.0, 0.0
        kind = packed.kind[queue]
        if first[queue] == first[queue + 1]:
            sums[DISPLACED] += empty_cost(packed, queue)
        for place in range(first[queue], first[queue + 1]):
            group = groups[place]
            swap, counts = 0.0, True
            if before < 0:
                start_s, variance, run_s, busy_s, swap, gives_way = opening(packed, queue, group)
                counts = packed.active[queue] >= 0
                sums[SWAPS] += packed.model[group] != packed.active[queue]
                sums[REDO] += packed.queue[queue, CLEAR_COST] if gives_way else 0.0
                sums[DISPLACED] += weights[HEAD_GAIN] if displaces(packed, queue, group) else 0.0
            elif packed.model[before] != packed.model[group]:
                end_s = max(start_s + packed.on_kind[kind, before, DRAIN], busy_s)
                model = packed.model[group]
                swap = max(packed.warm[kind, model], packed.swap[queue, model] - (end_s - run_s))
                start_s = run_s = end_s + swap
                variance += packed.on_kind[kind, before, OWN_VARIANCE]
                sums[SWAPS] += 1
            sums[SUM_SWAP] += swap if counts else 0.0
            work_s, own_s = packed.on_kind[kind, group, WORK], packed.on_kind[kind, group, OWN]
            own_variance, work_variance = packed.on_kind[kind, group, OWN_VARIANCE], packed.on_kind[kind, group, WORK_VARIANCE]
            requests = packed.group[group, REQUESTS]
            gap_s, stretch_s = start_s + own_s - packed.group[group, DEADLINE], work_s - packed.group[group, SPREAD]
            late, tardiness_s = lateness(gap_s, stretch_s, variance + own_variance, work_variance)
            sums[SUM_LATE] += requests * late
            each[group, LATE_SHARE], each[group, OVER] = late, gap_s + max(0.0, stretch_s)
            sums[SUM_TARDINESS] += requests * tardiness_s
            sums[SUM_COMPLETION] += requests * (start_s + own_s + 0.5 * work_s)
            sums[STARVATION] += packed.group[group, STARVING] * max(0.0, start_s + work_s + own_s - packed.group[group, STARVES])
            start_s += work_s
            variance += work_variance
            before = group
    sums[TOTAL] = (
        weights[LATE] * sums[SUM_LATE]
        + weights[TARDINESS] * sums[SUM_TARDINESS]
        + weights[WORK_WEIGHT] * sums[SUM_SWAP]
        + sums[REDO]
        + sums[DISPLACED]
        + sums[STARVATION]
        + weights[COMPLETION] * sums[SUM_COMPLETION]
    )


def evaluated(packed: Packed, first: NDArray[np.int64], groups: Integers) -> tuple[Costs, Floats]:
    """The cost of orders that fit and are valid, with no group where it cannot be served; and of each group [G, 2] the share of its
    requests that is expected to be late, and by how many seconds the latest is in the mean. Groups on no queue are late for ever."""
    sums, each = np.zeros(TOTAL + 1), np.ones((len(packed.model), 2))
    each[:, OVER] = np.inf
    _evaluate(packed, first, groups, sums, each)
    costs = Costs(
        late=float(sums[SUM_LATE]),
        tardiness_s=float(sums[SUM_TARDINESS]),
        swap_s=float(sums[SUM_SWAP]),
        swaps=int(sums[SWAPS]),
        redo_cost=float(sums[REDO]),
        displaced_cost=float(sums[DISPLACED]),
        starvation_cost=float(sums[STARVATION]),
        completion_s=float(sums[SUM_COMPLETION]),
        total=float(sums[TOTAL]),
    )
    return costs, each
