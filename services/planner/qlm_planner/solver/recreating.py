"""Ruin and recreate (Schrimpf et al. 2000; strings as in Christiaens and Vanden Berghe 2020), annealed: related groups leave the queues and
come back one by one, or run by run, each at its best place. One large move gets where a row of small ones cannot, each of which would make
others late: a swap is longer than the work of a group.

Bounded by work, deterministic under a seed. A place is given up as soon as it costs more than the best one so far, or than the acceptance
limit leaves.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.annealing import by_model, typical_rise
from qlm_planner.solver.chance import State, below, uniform
from qlm_planner.solver.compiled import compiled, lean
from qlm_planner.solver.lines import differs, lines_cost, lines_of, no_walks, put_back, put_in, take_out
from qlm_planner.solver.packing import CLEAR_COST, DEADLINE, HEAD_GAIN, REQUESTS, Packed
from qlm_planner.solver.places import cheapest_place, nothing_known
from qlm_planner.solver.plan import orders_in, plan_of
from qlm_planner.solver.problem import Booleans, Floats, Integers
from qlm_planner.solver.ruin import OUT_MAX, chosen

HOT, COOLING = 0.3, 1e-3
"""The first temperature, over what a small move costs more in the median; the last one over the first."""
A_MOVE, PUT_IN, A_PLACE, WALKED = 0.25, 1.2, 0.021, 0.032
"""Processor time over that of a small move (0.7 µs): a large move by itself; a group that comes back; a place that is looked at; a group
that is walked over to see what a place costs."""
PASSED_OVER = 0.02
"""Of the places, at random: without it the same order would come of the same groups each time."""
SHUFFLED, BY_DEADLINE, BY_REQUESTS = 0.35, 0.3, 0.2
"""Of the moves: the order in which groups come back. The others come as they stood, runs in one piece."""
CHECKS = 128
"""The best orders so far are looked for so many times on the way."""


@compiled
def recreate(
    packed: Packed, terms: Floats, first: NDArray[np.int64], groups: Integers, capacity: int, moves: int, chance: State
) -> tuple[NDArray[np.int64], Integers]:
    """From valid orders: the best ones seen."""
    best_first, best_groups = first, groups
    if len(groups) == 0:
        return best_first, best_groups
    hot = HOT * typical_rise(packed, plan_of(packed, first, groups, capacity), groups, capacity, chance)
    lines, kept = lines_of(packed, terms, first, groups, capacity), lines_of(packed, terms, first, groups, capacity)
    walks = no_walks(capacity)
    of_model, model_first = by_model(packed)
    touched, out = np.zeros(len(lines.size), dtype=np.bool_), np.zeros(len(packed.model), dtype=np.bool_)
    block, marked = np.empty(OUT_MAX, dtype=np.int32), np.empty(OUT_MAX, dtype=np.int32)
    known = nothing_known(len(packed.model), len(lines.size))
    best = cost = lines_cost(packed, lines)
    spent, check, version = 0.0, 0.0, 0
    temperature = hot
    while spent < moves:
        if spent >= check:
            check += moves / CHECKS
            temperature = hot * COOLING ** (spent / moves)
            if cost < best:
                best = cost
                best_first, best_groups = orders_in(lines.order, lines.size)
        limit = -temperature * math.log(1.0 - uniform(chance))
        touched[:] = False
        size = chosen(packed, lines, chance, groups, of_model, model_first, out, marked)
        block[:size] = marked[:size]
        whole_runs = _order(packed, chance, block, size)
        more = take_out(packed, terms, lines, kept, touched, out, marked, size)
        spent += A_MOVE
        spare = _spare(packed, touched)
        begin = 0
        while begin < size and more <= limit + spare:
            end = begin + 1
            while whole_runs and end < size and _goes_on(packed, block, end):
                end += 1
            queue, place, _, places, walked, side = cheapest_place(
                packed, terms, lines, known, touched, block, begin, end, limit + spare - more, chance, PASSED_OVER, walks
            )
            spent += A_PLACE * places + WALKED * walked
            if queue < 0:
                break
            more += put_in(packed, terms, lines, kept, touched, queue, place, block, begin, end, walks, side)
            spent += PUT_IN
            begin = end
        for number in range(size):
            out[marked[number]] = False
        if begin == size and more <= limit:
            cost += more
            version += 1
            for queue in range(len(touched)):
                if touched[queue] and differs(lines, kept, queue):
                    known.now[queue] = version
        else:
            put_back(lines, kept, touched)
    if cost < best:
        best_first, best_groups = orders_in(lines.order, lines.size)
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
