"""Changes of orders that the annealing tries: a block somewhere else, two groups in each other's place, two queues with each other's tails.

Each draws until it fits (bands, instances that can serve, room) or gives up, and leaves one or two sketches.
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
"""Groups that move together at the most, but for whole runs."""
BESIDE_SHARE, DEADLINE_SHARE, ANYWHERE_SHARE = 0.4, 0.2, 0.08
"""Of the places that are drawn: beside a group of the same model; in the order of deadlines; inside runs too. The others are between
runs."""
SAME_QUEUE_SHARE = 0.3
"""Of the places that are not beside a group: on the queue that the group is on."""


@lean
def run_end(packed: Packed, plan: OrderState, queue: int, place: int) -> int:
    """Behind the last group of the run that the place belongs to."""
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
    """The nearest place of the queue where a block from band `low` to `high` may stand; -1 for none."""
    while place > 0 and packed.band[plan.order[queue, place - 1]] > low:
        place -= 1
    while place < plan.size[queue] and packed.band[plan.order[queue, place]] < high:
        place += 1
    if place > 0 and packed.band[plan.order[queue, place - 1]] > low:
        return -1
    return place


@lean
def serves_all(packed: Packed, plan: OrderState, queue: int, begin: int, end: int, other: int) -> bool:
    """The groups [begin, end) of a queue can be on another one."""
    kind = packed.kind[other]
    if kind == packed.kind[queue]:
        return True
    able = True
    for place in range(begin, end):
        able = able and packed.serves[kind, plan.order[queue, place]]
    return bool(able)


@lean
def by_deadline(packed: Packed, plan: OrderState, queue: int, group: int) -> int:
    """In front of the first group of its band with a later deadline, or behind all of the band."""
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
    """A queue and a place for a group, drawn: beside a group of its model, in the order of deadlines, or anywhere."""
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
    # Inside a run of another model it would cost two swaps: to one of its ends.
    if 0 < place < plan.size[queue]:
        there = packed.model[plan.order[queue, place]]
        if there != model and packed.model[plan.order[queue, place - 1]] == there:
            place = run_begin(packed, plan, queue, place) if below(chance, 2) == 0 else run_end(packed, plan, queue, place)
    return queue, place


@lean
def fill(sketch: Sketch, plan: OrderState, at: int, queue: int, begin: int, end: int) -> int:
    """Groups [begin, end) of a queue into the sketch, from `at` on; where they end there."""
    for place in range(begin, end):
        sketch.groups[at] = plan.order[queue, place]
        at += 1
    return at


@lean
def seal(sketch: Sketch, queue: int, begin: int, length: int, kept: int) -> None:
    sketch.at[QUEUE], sketch.at[BEGIN], sketch.at[LENGTH], sketch.at[KEPT] = queue, begin, length, kept


@lean
def sketch_block(
    packed: Packed, plan: OrderState, source: int, begin: int, end: int, target: int, place: int, one: Sketch, other: Sketch
) -> int:
    """The block [begin, end) of a queue to a place of a queue (as it is now). How many queues change; 0 where it cannot be."""
    order = plan.order
    if source != target and (plan.size[target] + end - begin > order.shape[1] or not serves_all(packed, plan, source, begin, end, target)):
        return 0
    place = in_band(packed, plan, target, place, packed.band[order[source, begin]], packed.band[order[source, end - 1]])
    if place < 0:
        return 0
    size = plan.size[source]
    if source == target:
        if begin <= place <= end:
            return 0
        if place < begin:
            at = fill(one, plan, 0, source, begin, end)
            at = fill(one, plan, at, source, place, begin)
            at = fill(one, plan, at, source, end, size)
            seal(one, source, place, at, size - end)
        else:
            at = fill(one, plan, 0, source, end, place)
            at = fill(one, plan, at, source, begin, end)
            at = fill(one, plan, at, source, place, size)
            seal(one, source, begin, at, size - place)
        return 1
    at = fill(one, plan, 0, source, end, size)
    seal(one, source, begin, at, size - end)
    at = fill(other, plan, 0, source, begin, end)
    at = fill(other, plan, at, target, place, plan.size[target])
    seal(other, target, place, at, plan.size[target] - place)
    return 2


@lean
def fits_in_place(packed: Packed, plan: OrderState, queue: int, begin: int, end: int, low: int, high: int) -> bool:
    """Groups from band `low` to `high` may stand in place of those at [begin, end)."""
    if begin > 0 and packed.band[plan.order[queue, begin - 1]] > low:
        return False
    return bool(end >= plan.size[queue] or packed.band[plan.order[queue, end]] >= high)


@lean
def sketch_exchange(
    packed: Packed, plan: OrderState, source: int, begin: int, end: int, target: int, place: int, stop: int, one: Sketch, other: Sketch
) -> int:
    """The blocks [begin, end) of a queue and [place, stop) of a queue in each other's place."""
    band, order = packed.band, plan.order
    if source == target:
        if place < begin:
            begin, end, place, stop = place, stop, begin, end
        if place < end or band[order[source, begin]] != band[order[source, stop - 1]]:
            return 0
        at = fill(one, plan, 0, source, place, stop)
        at = fill(one, plan, at, source, end, place)
        at = fill(one, plan, at, source, begin, end)
        seal(one, source, begin, fill(one, plan, at, source, stop, plan.size[source]), plan.size[source] - stop)
        return 1
    more = (stop - place) - (end - begin)
    if plan.size[source] + more > order.shape[1] or plan.size[target] - more > order.shape[1]:
        return 0
    if not (
        serves_all(packed, plan, source, begin, end, target)
        and serves_all(packed, plan, target, place, stop, source)
        and fits_in_place(packed, plan, source, begin, end, band[order[target, place]], band[order[target, stop - 1]])
        and fits_in_place(packed, plan, target, place, stop, band[order[source, begin]], band[order[source, end - 1]])
    ):
        return 0
    at = fill(one, plan, 0, target, place, stop)
    seal(one, source, begin, fill(one, plan, at, source, end, plan.size[source]), plan.size[source] - end)
    at = fill(other, plan, 0, source, begin, end)
    seal(other, target, place, fill(other, plan, at, target, stop, plan.size[target]), plan.size[target] - stop)
    return 2


@lean
def sketch_tails(packed: Packed, plan: OrderState, source: int, begin: int, target: int, place: int, one: Sketch, other: Sketch) -> int:
    """What follows in two queues, each behind the other's front."""
    order = plan.order
    of_source, of_target = plan.size[source] - begin, plan.size[target] - place
    if source == target or of_source + of_target == 0:
        return 0
    if begin + of_target > order.shape[1] or place + of_source > order.shape[1]:
        return 0
    if begin > 0 and of_target > 0 and packed.band[order[source, begin - 1]] > packed.band[order[target, place]]:
        return 0
    if place > 0 and of_source > 0 and packed.band[order[target, place - 1]] > packed.band[order[source, begin]]:
        return 0
    if not serves_all(packed, plan, source, begin, plan.size[source], target):
        return 0
    if not serves_all(packed, plan, target, place, plan.size[target], source):
        return 0
    seal(one, source, begin, fill(one, plan, 0, target, place, plan.size[target]), 0)
    seal(other, target, place, fill(other, plan, 0, source, begin, plan.size[source]), 0)
    return 2
