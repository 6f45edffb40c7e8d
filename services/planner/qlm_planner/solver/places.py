"""The cheapest place of a block of groups. As `plan.walk`, for all places of all queues in one go and without leaving a trace: most are
given up at once or within two groups, where handing things over would be most of the time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.chance import State, uniform
from qlm_planner.solver.compiled import compiled, lean
from qlm_planner.solver.cost import front_cost, lateness, opening
from qlm_planner.solver.lines import COST, HIDDEN, RATE, RUN, START, VARIANCE, Lines
from qlm_planner.solver.packing import (
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
from qlm_planner.solver.plan import SAME_S
from qlm_planner.solver.problem import Booleans, Floats, Integers


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
    lines: Lines,
    known: Known,
    touched: Booleans,
    block: Integers,
    first: int,
    stop: int,
    allowance: float,
    chance: State,
    passed_over: float,
) -> tuple[int, int, float, int, int]:
    """Of the groups [first, stop) of the block, all of one model: the queue (-1 where none costs less than the allowance), the place, what
    it costs more; how many places were looked at, and groups walked over. Places inside runs of other models are left out, and others at
    random. What was found for a single group on a queue that is not touched is known until that queue has another version."""
    models, bands, rows, order_of = packed.model, packed.band, packed.group, lines.order
    late_weight, tardiness_weight = packed.weights[LATE], packed.weights[TARDINESS]
    work_weight, completion_weight = packed.weights[WORK_WEIGHT], packed.weights[COMPLETION]
    lead = block[first]
    own_model, low, high = models[lead], bands[lead], bands[block[stop - 1]]
    inserted = stop - first
    lead_requests = rows[lead, REQUESTS]
    lead_due_s = rows[lead, DEADLINE] + 0.5 * rows[lead, SPREAD]
    best_queue, best_place, best, tried, walked = -1, -1, allowance, 0, 0
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
        on_kind, swaps, warms = packed.on_kind[kind], packed.swap[queue], packed.warm[kind]
        total_before = at[size, COST]
        if size == 0:
            total_before = packed.weights[HEAD_GAIN] if packed.head[queue] >= 0 else 0.0
        block_work_s, block_drain_s = 0.0, on_kind[block[stop - 1], DRAIN]
        for number in range(first, stop):
            block_work_s += on_kind[block[number], WORK]
        lead_done_s = on_kind[lead, OWN] + 0.5 * on_kind[lead, WORK]
        found = -1
        for place in range(size, -1, -1):
            if place < size and bands[order[place]] < high:
                break
            before = -1
            if place > 0:
                before = order[place - 1]
                if bands[before] > low:
                    continue
                if place < size and models[before] != own_model and models[before] == models[order[place]]:
                    continue
            tried += 1
            if passes > 0.0 and uniform(chance) < passes:
                continue
            start_s, variance, run_s, total = at[place, START], at[place, VARIANCE], at[place, RUN], at[place, COST]
            busy_s = lines.busy_s[queue]
            before_model, drain_s, drain_variance = -1, 0.0, 0.0
            if place > 0:
                before_model, drain_s, drain_variance = models[before], on_kind[before, DRAIN], on_kind[before, OWN_VARIANCE]
                # What it costs at the least, without chances.
                begin_s, since_s, least = start_s, run_s, 0.0
                end_s = max(start_s + drain_s, busy_s)
                if before_model != own_model:
                    swap_s = max(warms[own_model], swaps[own_model] - (end_s - run_s))
                    begin_s = since_s = end_s + swap_s
                    least = work_weight * swap_s
                done_s = begin_s + lead_done_s
                least += lead_requests * (completion_weight * done_s + tardiness_weight * max(0.0, done_s - lead_due_s))
                if place < size:
                    behind = order[place]
                    behind_model = models[behind]
                    begin_s += block_work_s
                    if behind_model != own_model:
                        free_s = max(begin_s + block_drain_s, busy_s)
                        swap_s = max(warms[behind_model], swaps[behind_model] - (free_s - since_s))
                        begin_s = since_s = free_s + swap_s
                        least += work_weight * swap_s
                    if behind_model != before_model:
                        least -= work_weight * (at[place + 1, RUN] - end_s)
                    later_s = begin_s - (at[place + 1, START] - on_kind[behind, WORK])
                    if later_s > -SAME_S:
                        hidden_s = min(max(0.0, later_s - (since_s - at[place + 1, RUN])), at[place, HIDDEN])
                        least += at[place, RATE] * (later_s - hidden_s) - work_weight * hidden_s
                    else:
                        least = -np.inf
                if least >= best:
                    continue
            most, more = total_before + best, np.inf
            for number in range(inserted + size - place):
                walked += 1
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
                late, tardiness_s = lateness(
                    start_s + own_s - row[DEADLINE], work_s - row[SPREAD], variance + drain_variance, work_variance
                )
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
                    later_s = start_s - at[was, START]
                    if later_s > -SAME_S and variance - at[was, VARIANCE] > -SAME_S:
                        hidden_s = min(max(0.0, later_s - (run_s - at[was, RUN])), at[was - 1, HIDDEN])
                        if total - at[was, COST] + at[was, RATE] * (later_s - hidden_s) - work_weight * hidden_s >= best:
                            break
            else:
                more = total - total_before
            if more < best:
                found, best_queue, best_place, best = place, queue, place, more
        if inserted == 1 and not touched[queue]:
            known.version[lead, queue], known.cost[lead, queue], known.place[lead, queue] = known.now[queue], best, found
    return best_queue, best_place, best, tried, walked
