"""The cheapest place of a block of groups. As `plan.walk`, for all places of all queues in one go and without leaving a trace: most are
given up at once or within two groups, where handing things over would be most of the time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.chance import State, uniform
from qlm_planner.solver.compiled import compiled, lean
from qlm_planner.solver.cost import POINTS, front_cost, opening
from qlm_planner.solver.lines import COST, HIDDEN, OWN_RATE, RATE, RUN, SLACK, START, VARIANCE, Lines, Walks
from qlm_planner.solver.packing import HEAD_GAIN, WORK_WEIGHT, Packed
from qlm_planner.solver.plan import SAME_S
from qlm_planner.solver.problem import Booleans, Floats, Integers
from qlm_planner.solver.terms import (
    T_COMPLETION,
    T_DONE,
    T_DRAIN,
    T_FIRST,
    T_HIGH,
    T_LATE,
    T_LOW,
    T_MIDDLE,
    T_OWN_VARIANCE,
    T_STARVES,
    T_STARVING,
    T_STRETCH,
    T_TARDY,
    T_WORK,
    T_WORK_VARIANCE,
    lateness_cost,
)


class Known(NamedTuple):
    """Where each group would go on each queue [G, Q], as the queue was at a `version`: `place` (-1: none that costs less than `cost`). [Q]:
    `now`, the version that the queue has."""

    version: NDArray[np.int64]
    cost: Floats
    place: Integers
    now: NDArray[np.int64]


@compiled
def nothing_known(groups: int, queues: int) -> Known:
    return Known(
        np.full((groups, queues), -1, dtype=np.int64),
        np.empty((groups, queues)),
        np.empty((groups, queues), dtype=np.int32),
        np.zeros(queues, dtype=np.int64),
    )


@lean
def cheapest_place(
    packed: Packed,
    terms: Floats,
    lines: Lines,
    known: Known,
    touched: Booleans,
    block: Integers,
    first: int,
    stop: int,
    allowance: float,
    chance: State,
    passed_over: float,
    walks: Walks,
) -> tuple[int, int, float, int, int, int]:
    """Of the groups [first, stop) of the block, all of one model: the queue (-1 where none costs less than the allowance), the place, what
    it costs more; how many places were looked at, and groups walked over; which of the walks goes there (-1: none). Places inside runs of
    other models are left out, and others at random. What was found for a single group on a queue that is not touched is known until that
    queue has another version."""
    models, bands, order_of = packed.model, packed.band, lines.order
    work_weight = packed.weights[WORK_WEIGHT]
    lead = block[first]
    own_model, low, high = models[lead], bands[lead], bands[block[stop - 1]]
    inserted = stop - first
    best_queue, best_place, best, tried, walked = -1, -1, allowance, 0, 0
    side, best_side = 0, -1
    queues = len(lines.size)
    if inserted == 1:
        for queue in range(queues):
            if touched[queue] or known.version[lead, queue] != known.now[queue] or known.place[lead, queue] < 0:
                continue
            if known.cost[lead, queue] < best and uniform(chance) >= passed_over:
                best_queue, best_place, best = queue, known.place[lead, queue], known.cost[lead, queue]
    for queue in range(queues):
        kind, size = packed.kind[queue], lines.size[queue]
        if inserted == 1:
            if not packed.serves[kind, lead] or size == order_of.shape[1]:
                continue
            is_known = not touched[queue] and known.version[lead, queue] == known.now[queue]
            if is_known and (known.place[lead, queue] >= 0 or known.cost[lead, queue] >= best):
                continue
        else:
            able = size + inserted <= order_of.shape[1]
            for number in range(first, stop):
                able = able and packed.serves[kind, block[number]]
            if not able:
                continue
        passes = passed_over if touched[queue] or inserted > 1 else 0.0
        order, at = order_of[queue], lines.at[queue]
        rows, swaps, warms = terms[kind], packed.swap[queue], packed.warm[kind]
        total_before = at[size, COST]
        if size == 0:
            total_before = packed.weights[HEAD_GAIN] if packed.head[queue] >= 0 else 0.0
        block_work_s, block_drain_s = 0.0, rows[block[stop - 1], T_DRAIN]
        for number in range(first, stop):
            block_work_s += rows[block[number], T_WORK]
        lead_done_s, lead_middle_s = rows[lead, T_DONE], rows[lead, T_MIDDLE]
        lead_completion, lead_tardy = rows[lead, T_COMPLETION], POINTS * rows[lead, T_TARDY]
        own_warm_s, own_swap_s = warms[own_model], swaps[own_model]
        line_busy_s = lines.busy_s[queue]
        found = -1
        behind_model = -1
        for place in range(size, -1, -1):
            before, before_model = -1, -1
            if place > 0:
                before = order[place - 1]
                before_model = models[before]
            behind_was = behind_model
            behind_model = before_model
            if place < size and bands[order[place]] < high:
                break
            if place > 0:
                if bands[before] > low:
                    continue
                if before_model != own_model and before_model == behind_was:
                    continue
            tried += 1
            if passes > 0.0 and uniform(chance) < passes:
                continue
            start_s, variance, run_s, total = at[place, START], at[place, VARIANCE], at[place, RUN], at[place, COST]
            busy_s = line_busy_s
            drain_s, drain_variance = 0.0, 0.0
            if place > 0:
                drain_s, drain_variance = rows[before, T_DRAIN], rows[before, T_OWN_VARIANCE]
                # What it costs at the least, without chances.
                begin_s, since_s, least = start_s, run_s, 0.0
                end_s = max(start_s + drain_s, busy_s)
                if before_model != own_model:
                    swap_s = max(own_warm_s, own_swap_s - (end_s - run_s))
                    begin_s = since_s = end_s + swap_s
                    least = work_weight * swap_s
                least += lead_completion * (begin_s + lead_done_s) + lead_tardy * max(0.0, begin_s + lead_middle_s)
                if place < size:
                    behind = order[place]
                    begin_s += block_work_s
                    if behind_was != own_model:
                        free_s = max(begin_s + block_drain_s, busy_s)
                        swap_s = max(warms[behind_was], swaps[behind_was] - (free_s - since_s))
                        begin_s = since_s = free_s + swap_s
                        least += work_weight * swap_s
                    if behind_was != before_model:
                        least -= work_weight * (at[place + 1, RUN] - end_s)
                    later_s = begin_s - (at[place + 1, START] - rows[behind, T_WORK])
                    if later_s > -SAME_S:
                        pushed_s = max(0.0, later_s - at[place, SLACK])
                        hidden_s = min(max(0.0, pushed_s - (since_s - at[place + 1, RUN])), at[place, HIDDEN])
                        least += at[place, RATE] * (pushed_s - hidden_s) - work_weight * hidden_s
                    else:
                        least = -np.inf
                if least >= best:
                    continue
            most, more = total_before + best, np.inf
            states = walks.at[side]
            for number in range(inserted + size - place):
                walked += 1
                group = block[first + number] if number < inserted else order[place + number - inserted]
                model = models[group]
                row = rows[group]
                if model != before_model:
                    if before_model < 0:
                        start_s, variance, run_s, busy_s, swap_s, gives_way = opening(packed, queue, group)
                        total = front_cost(packed, queue, group, swap_s, gives_way)
                        walks.busy_s[side] = busy_s
                    else:
                        end_s = max(start_s + drain_s, busy_s)
                        swap_s = max(warms[model], swaps[model] - (end_s - run_s))
                        start_s = run_s = end_s + swap_s
                        variance += drain_variance
                        total += work_weight * swap_s
                    before_model = model
                drain_s, drain_variance = row[T_DRAIN], row[T_OWN_VARIANCE]
                work_variance = row[T_WORK_VARIANCE]
                cost, rate = lateness_cost(
                    start_s + row[T_LOW],
                    start_s + row[T_HIGH],
                    start_s + row[T_FIRST],
                    row[T_STRETCH],
                    variance + drain_variance,
                    work_variance,
                    row[T_LATE],
                    row[T_TARDY],
                )
                total += cost + row[T_COMPLETION] * (start_s + row[T_DONE])
                rate += row[T_COMPLETION]
                starved_s = start_s + row[T_STARVES]
                start_s += row[T_WORK]
                variance += work_variance
                if starved_s > 0.0:
                    total += row[T_STARVING] * starved_s
                    rate += row[T_STARVING]
                if total >= most:
                    break
                states[number, START], states[number, VARIANCE], states[number, RUN] = start_s, variance, run_s
                states[number, COST], states[number, OWN_RATE] = total, rate
                if number >= inserted:
                    was = place + number - inserted + 1
                    later_s = start_s - at[was, START]
                    if later_s > -SAME_S and variance - at[was, VARIANCE] > -SAME_S:
                        pushed_s = max(0.0, later_s - at[was - 1, SLACK])
                        hidden_s = min(max(0.0, pushed_s - (run_s - at[was, RUN])), at[was - 1, HIDDEN])
                        if total - at[was, COST] + at[was, RATE] * (pushed_s - hidden_s) - work_weight * hidden_s >= best:
                            break
            else:
                more = total - total_before
            if more < best:
                found, best_queue, best_place, best = place, queue, place, more
                best_side, side = side, 1 - side
        if inserted == 1 and not touched[queue]:
            known.version[lead, queue], known.cost[lead, queue], known.place[lead, queue] = known.now[queue], best, found
    return best_queue, best_place, best, tried, walked, best_side
