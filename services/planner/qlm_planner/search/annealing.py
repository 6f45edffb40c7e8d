"""Simulated annealing of orders. The acceptance limit is drawn first, so that the evaluation of a move can stop early.

Most moves are rejected, and few orders have few moves: the cost that a rejected one exceeds is kept until one of its queues changes.
The number of moves bounds the search, a seed determines it, and the result never costs more than the start.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qlm_planner.search.compile_cache import compiled, lean
from qlm_planner.search.moves import BLOCK_MAX, NO_MOVE, Move, block_to, drawn_place, exchange, run_begin, run_end, sketch_move
from qlm_planner.search.order_state import OrderState, commit, empty_sketch, orders_in, plan_cost, plan_of, walk
from qlm_planner.search.packing import Packed
from qlm_planner.search.problem import Integers
from qlm_planner.search.random_numbers import State, below, uniform

COOLING = 1e-3
"""Last temperature over the first."""
RELOCATE_SHARE, TAILS_SHARE = 0.75, 0.1
"""Shares of the moves that relocate a block, and that exchange the tails of two queues. Others exchange two groups or two runs."""
RUN_SHARE = 0.2
"""Share of the blocks that are a whole run; as many are the end of one, half as many cross runs."""
CHECKS = 32
"""Times at which the best orders so far are stored."""
KEPT_BITS, PLACE_BITS = 11, 15
"""2^KEPT_BITS costs of rejected moves are kept, on queues with room for fewer than 2^PLACE_BITS groups."""
MIXER = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: spreads keys."""


@compiled
def anneal(
    packed: Packed, first: NDArray[np.int64], groups: Integers, capacity: int, moves: int, hot: float, chance: State
) -> tuple[NDArray[np.int64], Integers, float]:
    """Anneals valid orders from a temperature in the unit of the objective; returns the best orders and their cost."""
    plan = plan_of(packed, first, groups, capacity)
    cost = plan_cost(plan)
    best_first, best_groups, best = first, groups, cost
    if len(groups) == 0:
        return best_first, best_groups, best
    # Groups sorted by model, and the first index of each model.
    of_model = np.argsort(packed.model, kind="mergesort").astype(np.int32)
    model_first = np.searchsorted(packed.model[of_model], np.arange(packed.swap.shape[1] + 1))
    one, other = empty_sketch(2 * capacity), empty_sketch(2 * capacity)
    # The moves by their blocks and the states of their queues, of which every one has its number.
    keys, bounds = np.full((1 << KEPT_BITS, 2), -1, dtype=np.int64), np.empty(1 << KEPT_BITS)
    states, states_made = np.arange(len(plan.size)), len(plan.size)
    every = max(1, moves // CHECKS)
    cooling = COOLING ** (1.0 / CHECKS)
    temperature = hot
    for number in range(moves):
        if number % every == every - 1:
            temperature *= cooling
            if cost < best:
                best = cost
                best_first, best_groups = orders_in(plan.order, plan.size)
        move = _draw(packed, plan, chance, groups, of_model, model_first)
        source, begin, end, target, place, stop = move
        if source < 0:
            continue
        limit = -temperature * math.log(1.0 - uniform(chance))
        blocks = ((begin << PLACE_BITS | end) << PLACE_BITS | place) << PLACE_BITS | stop
        queues = states[source] << 32 | states[target]
        at = _spread(blocks, queues)
        if keys[at, 0] == blocks and keys[at, 1] == queues and limit < bounds[at]:
            continue
        sketch_move(plan, move, one, other)
        more = walk(packed, plan, one, limit if source == target else np.inf)
        if source != target:
            more += walk(packed, plan, other, limit - more)
        if more <= limit:
            commit(plan, one)
            if source != target:
                commit(plan, other)
            cost += more
            states[source], states[target] = states_made, states_made + 1
            states_made += 2
        elif capacity < 1 << PLACE_BITS:
            keys[at, 0], keys[at, 1], bounds[at] = blocks, queues, limit if more == np.inf else more
    if cost < best:
        best = cost
        best_first, best_groups = orders_in(plan.order, plan.size)
    return best_first, best_groups, best


@lean
def _spread(blocks: int, queues: int) -> int:
    return int(((np.uint64(blocks) * MIXER ^ np.uint64(queues)) * MIXER) >> np.uint64(64 - KEPT_BITS))


@lean
def _draw(packed: Packed, plan: OrderState, chance: State, groups: Integers, of_model: Integers, model_first: NDArray[np.int64]) -> Move:
    """The next move, or `NO_MOVE`."""
    group = groups[below(chance, len(groups))]
    queue, place = plan.queue_of[group], plan.place_of[group]
    kind_of_move = uniform(chance)
    if kind_of_move < RELOCATE_SHARE:
        begin, end = place, place + 1
        kind_of_block = uniform(chance)
        if kind_of_block < RUN_SHARE:
            begin, end = run_begin(packed, plan, queue, place), run_end(packed, plan, queue, place)
        elif kind_of_block < 2.0 * RUN_SHARE:
            end = run_end(packed, plan, queue, place)
        elif kind_of_block < 2.5 * RUN_SHARE:
            end = min(plan.size[queue], place + 2 + below(chance, BLOCK_MAX - 1))
        target, at = drawn_place(packed, plan, chance, group, of_model, model_first)
        return NO_MOVE if target < 0 else block_to(packed, plan, queue, begin, end, target, at)
    with_group = groups[below(chance, len(groups))]
    target, at = plan.queue_of[with_group], plan.place_of[with_group]
    if kind_of_move < 1.0 - TAILS_SHARE:
        begin, end, at_end = place, place + 1, at + 1
        if below(chance, 2) == 0:
            begin, end = run_begin(packed, plan, queue, place), run_end(packed, plan, queue, place)
            at, at_end = run_begin(packed, plan, target, at), run_end(packed, plan, target, at)
        return exchange(packed, plan, queue, begin, end, target, at, at_end)
    begin, at = place + below(chance, 2), at + below(chance, 2)
    if queue == target or plan.size[queue] - begin + plan.size[target] - at == 0:
        return NO_MOVE
    return exchange(packed, plan, queue, begin, plan.size[queue], target, at, plan.size[target])
