"""The cheapest place of a block of groups on a queue. As `plan.walk`, for all places in one go and without leaving a trace: most are given
up within two or three groups, where handing things over would be most of the time."""

from __future__ import annotations

import numpy as np

from qlm_planner.solver.chance import State, uniform
from qlm_planner.solver.compiled import lean
from qlm_planner.solver.cost import front_cost, lateness, opening
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
    WORK_WEIGHT,
    Packed,
)
from qlm_planner.solver.plan import SAME_S, Plan, queue_cost
from qlm_planner.solver.problem import Integers


@lean
def cheapest_place(
    packed: Packed, plan: Plan, queue: int, block: Integers, first: int, stop: int, allowance: float, chance: State, passed_over: float
) -> tuple[int, float, int]:
    """Of the groups [first, stop) of the block, all of one model, on a queue that can serve them: the place (-1 where none costs less than
    the allowance), what it costs more, and how many places were tried. Places inside runs of other models are left out, and others at
    random."""
    kind, size = packed.kind[queue], plan.size[queue]
    order, was_start, was_variance = plan.order[queue], plan.start_s[queue], plan.variance[queue]
    was_run, was_cost = plan.run_s[queue], plan.cost[queue]
    on_kind, rows, models, bands = packed.on_kind[kind], packed.group, packed.model, packed.band
    swaps, warms = packed.swap[queue], packed.warm[kind]
    late_weight, tardiness_weight = packed.weights[LATE], packed.weights[TARDINESS]
    work_weight, completion_weight = packed.weights[WORK_WEIGHT], packed.weights[COMPLETION]
    total_before = queue_cost(packed, plan, queue)
    own_model, low, high = models[block[first]], bands[block[first]], bands[block[stop - 1]]
    inserted = stop - first
    best_place, best, tried = -1, allowance, 0
    for place in range(size, -1, -1):
        if place < size and bands[order[place]] < high:
            break
        if place > 0:
            before = order[place - 1]
            if bands[before] > low:
                continue
            if place < size and models[before] != own_model and models[before] == models[order[place]]:
                continue
        if uniform(chance) < passed_over:
            continue
        tried += 1
        start_s, variance, run_s, total = was_start[place], was_variance[place], was_run[place], was_cost[place]
        busy_s = plan.busy_s[queue]
        before_model, drain_s, drain_variance = -1, 0.0, 0.0
        if place > 0:
            before = order[place - 1]
            before_model, drain_s, drain_variance = models[before], on_kind[before, DRAIN], on_kind[before, OWN_VARIANCE]
        most, more = total_before + best, np.inf
        for number in range(inserted + size - place):
            group = block[first + number] if number < inserted else order[place + number - inserted]
            model = models[group]
            if before_model < 0:
                start_s, variance, run_s, busy_s, swap_s, gives_way = opening(packed, queue, group)
                total = front_cost(packed, queue, group, swap_s, gives_way)
            elif model != before_model:
                end_s = max(start_s + drain_s, busy_s)
                swap_s = max(warms[model], swaps[model] - (end_s - run_s))
                start_s = run_s = end_s + swap_s
                variance += drain_variance
                total += work_weight * swap_s
            before_model = model
            row, on = rows[group], on_kind[group]
            work_s, own_s, work_variance = on[WORK], on[OWN], on[WORK_VARIANCE]
            drain_s, drain_variance = on[DRAIN], on[OWN_VARIANCE]
            late, tardiness_s = lateness(start_s + own_s - row[DEADLINE], work_s - row[SPREAD], variance + drain_variance, work_variance)
            completion_s = start_s + own_s + 0.5 * work_s
            total += row[REQUESTS] * (late_weight * late + tardiness_weight * tardiness_s + completion_weight * completion_s)
            start_s += work_s
            variance += work_variance
            starved_s = start_s + own_s - row[STARVES]
            if starved_s > 0.0:
                total += row[STARVING] * starved_s
            if total >= most:
                break
            if number >= inserted:
                was = place + number - inserted + 1
                later_s = start_s - was_start[was]
                if later_s > -SAME_S and variance - was_variance[was] > -SAME_S:
                    longer_s = later_s - (run_s - was_run[was])
                    if total - was_cost[was] - work_weight * max(0.0, longer_s) >= best:
                        break
        else:
            more = total - total_before
        if more < best:
            best_place, best = place, more
    return best_place, best, tried
