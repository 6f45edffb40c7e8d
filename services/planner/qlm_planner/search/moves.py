"""Moves of the annealing: relocate a block, exchange two blocks, exchange the tails of two queues.

All are exchanges of two blocks, of which one may be empty. Each checks its constraints (bands, instances that can serve, room).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qlm_planner.search.compile_cache import lean
from qlm_planner.search.order_state import BEGIN, KEPT, LENGTH, QUEUE, OrderState, Sketch
from qlm_planner.search.packing import DEADLINE, Packed
from qlm_planner.search.problem import Integers
from qlm_planner.search.random_numbers import State, below, uniform

BLOCK_MAX = 8
"""Most groups of a block, except whole runs."""
BESIDE_SHARE, DEADLINE_SHARE, ANYWHERE_SHARE = 0.4, 0.2, 0.08
"""Shares of the positions drawn beside a group of the same model, by deadline, and anywhere. Others are between runs."""
SAME_QUEUE_SHARE = 0.3
"""Share of the positions not beside a group that are on the group's own queue."""
Move = tuple[int, int, int, int, int, int]
"""(queue, begin, end, queue, place, stop): its blocks [begin, end) and [place, stop) are exchanged, the first before the second on one
queue."""
NO_MOVE = (-1, 0, 0, 0, 0, 0)


@lean
def run_end(packed: Packed, plan: OrderState, queue: int, place: int) -> int:
    """The position behind the run at a position."""
    model = packed.model[plan.order[queue, place]]
    end = place + 1
    while end < plan.size[queue] and packed.model[plan.order[queue, end]] == model:
        end += 1
    return end


@lean
def run_begin(packed: Packed, plan: OrderState, queue: int, place: int) -> int:
    model = packed.model[plan.order[queue, place]]
    while place > 0 and packed.model[plan.order[queue, place - 1]] == model:
        place -= 1
    return place


@lean
def in_band(packed: Packed, plan: OrderState, queue: int, place: int, low: int, high: int) -> int:
    """The nearest position of a queue for a block from band `low` to `high`; -1 for none."""
    while place > 0 and packed.band[plan.order[queue, place - 1]] > low:
        place -= 1
    while place < plan.size[queue] and packed.band[plan.order[queue, place]] < high:
        place += 1
    if place > 0 and packed.band[plan.order[queue, place - 1]] > low:
        return -1
    return place


@lean
def serves_all(packed: Packed, plan: OrderState, queue: int, begin: int, end: int, other: int) -> bool:
    """Whether another queue can serve the groups [begin, end) of a queue."""
    kind = packed.kind[other]
    if kind == packed.kind[queue]:
        return True
    able = True
    for place in range(begin, end):
        able = able and packed.serves[kind, plan.order[queue, place]]
    return bool(able)


@lean
def by_deadline(packed: Packed, plan: OrderState, queue: int, group: int) -> int:
    """The position in front of the first group of its band with a later deadline, or behind the band."""
    place, band, deadline_s = 0, packed.band[group], packed.group[group, DEADLINE]
    while place < plan.size[queue]:
        other = plan.order[queue, place]
        if packed.band[other] > band or (packed.band[other] == band and packed.group[other, DEADLINE] > deadline_s):
            break
        place += 1
    return place


@lean
def drawn_place(
    packed: Packed, plan: OrderState, chance: State, group: int, of_model: Integers, model_first: NDArray[np.int64]
) -> tuple[int, int]:
    """Draws a queue (-1 for none) and a position for a group: beside a group of its model, by deadline, or anywhere."""
    queues = len(plan.size)
    kind_of_place = uniform(chance)
    model = packed.model[group]
    if kind_of_place < BESIDE_SHARE:
        begin, end = model_first[model], model_first[model + 1]
        beside = of_model[begin + below(chance, end - begin)]
        if beside == group or plan.queue_of[beside] < 0:
            return -1, 0
        return plan.queue_of[beside], plan.place_of[beside] + below(chance, 2)
    queue = plan.queue_of[group] if uniform(chance) < SAME_QUEUE_SHARE else below(chance, queues)
    if kind_of_place < BESIDE_SHARE + DEADLINE_SHARE:
        place = by_deadline(packed, plan, queue, group)
    else:
        place = below(chance, plan.size[queue] + 1)
    if kind_of_place > 1.0 - ANYWHERE_SHARE:
        return queue, place
    # A position inside a run of another model costs two swaps: take one of the run's ends.
    if 0 < place < plan.size[queue]:
        there = packed.model[plan.order[queue, place]]
        if there != model and packed.model[plan.order[queue, place - 1]] == there:
            place = run_begin(packed, plan, queue, place) if below(chance, 2) == 0 else run_end(packed, plan, queue, place)
    return queue, place


@lean
def fill(sketch: Sketch, plan: OrderState, at: int, queue: int, begin: int, end: int) -> int:
    """Copies the groups [begin, end) of a queue into the sketch from `at`; returns the index behind them."""
    for place in range(begin, end):
        sketch.groups[at] = plan.order[queue, place]
        at += 1
    return at


@lean
def seal(sketch: Sketch, queue: int, begin: int, length: int, kept: int) -> None:
    sketch.at[QUEUE], sketch.at[BEGIN], sketch.at[LENGTH], sketch.at[KEPT] = queue, begin, length, kept


@lean
def fits_in_place(packed: Packed, plan: OrderState, queue: int, begin: int, end: int, low: int, high: int) -> bool:
    """Whether groups from band `low` to `high` may replace those at [begin, end)."""
    if begin > 0 and packed.band[plan.order[queue, begin - 1]] > low:
        return False
    return bool(end >= plan.size[queue] or packed.band[plan.order[queue, end]] >= high)


@lean
def block_to(packed: Packed, plan: OrderState, source: int, begin: int, end: int, target: int, place: int) -> Move:
    """A block [begin, end) to a position of a queue (as it is now), or `NO_MOVE`."""
    low, high = packed.band[plan.order[source, begin]], packed.band[plan.order[source, end - 1]]
    place = in_band(packed, plan, target, place, low, high)
    if place < 0 or (source == target and begin <= place <= end):
        return NO_MOVE
    if source != target:
        return exchange(packed, plan, source, begin, end, target, place, place)
    return (source, place, begin, source, begin, end) if place < begin else (source, begin, end, source, end, place)


@lean
def exchange(packed: Packed, plan: OrderState, source: int, begin: int, end: int, target: int, place: int, stop: int) -> Move:
    """Exchanges the blocks [begin, end) and [place, stop), or `NO_MOVE`. Of two queues, one block may be empty."""
    band, order = packed.band, plan.order
    if source == target:
        if place < begin:
            begin, end, place, stop = place, stop, begin, end
        if place < end or band[order[source, begin]] != band[order[source, stop - 1]]:
            return NO_MOVE
        return source, begin, end, source, place, stop
    more = (stop - place) - (end - begin)
    if plan.size[source] + more > order.shape[1] or plan.size[target] - more > order.shape[1]:
        return NO_MOVE
    if not (serves_all(packed, plan, source, begin, end, target) and serves_all(packed, plan, target, place, stop, source)):
        return NO_MOVE
    if stop > place and not fits_in_place(packed, plan, source, begin, end, band[order[target, place]], band[order[target, stop - 1]]):
        return NO_MOVE
    if end > begin and not fits_in_place(packed, plan, target, place, stop, band[order[source, begin]], band[order[source, end - 1]]):
        return NO_MOVE
    return source, begin, end, target, place, stop


@lean
def sketch_move(plan: OrderState, move: Move, one: Sketch, other: Sketch) -> None:
    """Sketches a move: in `one` what becomes of the first queue, in `other` of the second one, if it is another."""
    source, begin, end, target, place, stop = move
    at = fill(one, plan, 0, target, place, stop)
    if source == target:
        at = fill(one, plan, at, source, end, place)
        at = fill(one, plan, at, source, begin, end)
        kept = plan.size[source] - stop
        at = fill(one, plan, at, source, stop, plan.size[source])
    else:
        kept = plan.size[source] - end
        at = fill(one, plan, at, source, end, plan.size[source])
        both = fill(other, plan, 0, source, begin, end)
        both = fill(other, plan, both, target, stop, plan.size[target])
        seal(other, target, place, both, plan.size[target] - stop)
    seal(one, source, begin, at, kept)
