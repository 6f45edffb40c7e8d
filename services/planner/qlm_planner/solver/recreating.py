"""Ruin and recreate (Schrimpf et al. 2000; strings as in Christiaens and Vanden Berghe 2020), annealed: related groups leave the queues and
come back one by one, or run by run, each at its best place. One large move gets where a row of small ones cannot, each of which would make
others late: a swap is longer than the work of a group.

Bounded by the places tried, deterministic under a seed. A place is given up as soon as it costs more than the best one so far, or than the
acceptance limit leaves: six of them cost as much as a small move.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.annealing import by_model, typical_rise
from qlm_planner.solver.chance import State, below, uniform
from qlm_planner.solver.compiled import compiled, lean
from qlm_planner.solver.moves import fill, seal
from qlm_planner.solver.packing import CLEAR_COST, DEADLINE, HEAD_GAIN, REQUESTS, Packed
from qlm_planner.solver.places import cheapest_place
from qlm_planner.solver.plan import Plan, Sketch, commit, empty_sketch, orders_in, plan_cost, plan_of, walk
from qlm_planner.solver.problem import Booleans, Integers
from qlm_planner.solver.ruin import OUT_MAX, chosen, keep_queue, put_back, take_out

HOT, COOLING = 0.3, 1e-3
"""The first temperature, over what a small move costs more in the median; the last one over the first."""
PLACES_A_MOVE = 6.0
"""Places that take as long to try as a small move."""
PASSED_OVER = 0.02
"""Of the places, at random: without it the same order would come of the same groups each time."""
SHUFFLED, BY_DEADLINE, BY_REQUESTS = 0.35, 0.3, 0.2
"""Of the moves: the order in which groups come back. The others come as they stood, runs in one piece."""
CHECKS = 128
"""The best orders so far are looked for so many times on the way."""


@compiled
def recreate(
    packed: Packed, first: NDArray[np.int64], groups: Integers, capacity: int, moves: int, chance: State
) -> tuple[NDArray[np.int64], Integers]:
    """From valid orders: the best ones seen."""
    best_first, best_groups = first, groups
    if len(groups) == 0:
        return best_first, best_groups
    plan, kept = plan_of(packed, first, groups, capacity), plan_of(packed, first, groups, capacity)
    of_model, model_first = by_model(packed)
    sketch = empty_sketch(2 * capacity + OUT_MAX)
    touched, out = np.zeros(len(plan.size), dtype=np.bool_), np.zeros(len(packed.model), dtype=np.bool_)
    block, marked = np.empty(OUT_MAX, dtype=np.int32), np.empty(OUT_MAX, dtype=np.int32)
    hot = HOT * typical_rise(packed, plan, groups, capacity, chance)
    best = cost = plan_cost(packed, plan)
    budget, tried, check = PLACES_A_MOVE * moves, 0.0, 0.0
    temperature = hot
    while tried < budget:
        if tried >= check:
            check += budget / CHECKS
            temperature = hot * COOLING ** (tried / budget)
            if cost < best:
                best = cost
                best_first, best_groups = orders_in(plan)
        limit = -temperature * math.log(1.0 - uniform(chance))
        touched[:] = False
        size = chosen(packed, plan, chance, groups, of_model, model_first, out, marked)
        block[:size] = marked[:size]
        whole_runs = _order(packed, chance, block, size)
        more = take_out(packed, plan, kept, touched, out, sketch)
        tried += 1.0
        spare = _spare(packed, touched)
        begin = 0
        while begin < size and more <= limit + spare:
            end = begin + 1
            while whole_runs and end < size and _goes_on(packed, block, end):
                end += 1
            extra, places = _put(packed, plan, kept, touched, sketch, block, begin, end, limit + spare - more, chance)
            more += extra
            tried += places
            begin = end
        for number in range(size):
            out[marked[number]] = False
        if begin == size and more <= limit:
            cost += more
        else:
            put_back(plan, kept, touched)
    if cost < best:
        best_first, best_groups = orders_in(plan)
    return best_first, best_groups


@lean
def _spare(packed: Packed, touched: Booleans) -> float:
    """What the groups that come back may save at the most: in front of others, or on an empty queue, the head and what runs do not give
    way."""
    spare = 0.0
    for queue in range(len(touched)):
        if touched[queue]:
            spare += packed.weights[HEAD_GAIN] + packed.queue[queue, CLEAR_COST]
    return spare


@lean
def _goes_on(packed: Packed, block: Integers, at: int) -> bool:
    """The group belongs to the run of the one before."""
    group, before = block[at], block[at - 1]
    return bool(packed.model[group] == packed.model[before] and packed.band[group] >= packed.band[before])


@lean
def _order(packed: Packed, chance: State, block: Integers, size: int) -> bool:
    """In which order the groups come back; whether runs come in one piece."""
    kind = uniform(chance)
    if kind < SHUFFLED:
        for number in range(size - 1, 0, -1):
            other = below(chance, number + 1)
            block[number], block[other] = block[other], block[number]
        return False
    if kind >= SHUFFLED + BY_DEADLINE + BY_REQUESTS:
        return True
    column, sign = (DEADLINE, 1.0) if kind < SHUFFLED + BY_DEADLINE else (REQUESTS, -1.0)
    for number in range(1, size):
        group, at = block[number], number
        key = sign * packed.group[group, column]
        while at > 0 and sign * packed.group[block[at - 1], column] > key:
            block[at] = block[at - 1]
            at -= 1
        block[at] = group
    return False


@lean
def _put(
    packed: Packed,
    plan: Plan,
    kept: Plan,
    touched: Booleans,
    sketch: Sketch,
    block: Integers,
    begin: int,
    end: int,
    allowance: float,
    chance: State,
) -> tuple[float, int]:
    """Groups of one model in one piece to their cheapest place, if that costs less than the allowance: what it costs (infinite for none),
    and how many places were tried."""
    best_queue, best_place, best, tried = -1, -1, allowance, 0
    for queue in range(len(plan.size)):
        able = plan.size[queue] + end - begin <= plan.order.shape[1]
        for number in range(begin, end):
            able = able and packed.serves[packed.kind[queue], block[number]]
        if not able:
            continue
        place, more, places = cheapest_place(packed, plan, queue, block, begin, end, best, chance, PASSED_OVER)
        tried += places
        if place >= 0:
            best_queue, best_place, best = queue, place, more
    if best_queue < 0:
        return np.inf, tried
    keep_queue(plan, kept, touched, best_queue)
    for number in range(begin, end):
        sketch.groups[number - begin] = block[number]
    length = fill(sketch, plan, end - begin, best_queue, best_place, plan.size[best_queue])
    seal(sketch, best_queue, best_place, length, plan.size[best_queue] - best_place)
    more = walk(packed, plan, sketch, np.inf)
    commit(plan, sketch)
    return more, tried
