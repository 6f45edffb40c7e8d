"""Orders under change: each queue with the state before every position, so that a change costs at most its tail."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlm_planner.search import packing
from qlm_planner.search.compile_cache import compiled, lean
from qlm_planner.search.group_cost import cost_from, front_cost, opening
from qlm_planner.search.packing import Packed
from qlm_planner.search.problem import Floats, Integers

SAME_S = 1e-7
"""States nearer than this are equal: sums in another order differ."""


class OrderState(NamedTuple):
    """[Q, capacity]: `order`; [Q, capacity + 1], behind a number of groups: `start_s`, `variance`, `run_s`, `cost`. [Q]: `size`, `busy_s`.
    [G]: `queue_of`, `place_of` (-1 for no queue)."""

    order: NDArray[np.int32]
    size: Integers
    start_s: Floats
    variance: Floats
    run_s: Floats
    cost: Floats
    busy_s: Floats
    queue_of: Integers
    place_of: Integers


class Sketch(NamedTuple):
    """A queue with a new tail: from `at[BEGIN]` the `at[LENGTH]` groups of `groups`, whose last `at[KEPT]` are the queue's last ones now.
    `walk` fills the states behind the first `at[WALKED]` groups; later states are unchanged."""

    at: NDArray[np.int64]
    groups: Integers
    start_s: Floats
    variance: Floats
    run_s: Floats
    cost: Floats
    busy_s: Floats


(QUEUE, BEGIN, LENGTH, KEPT, WALKED) = range(5)


@compiled
def empty_sketch(size: int) -> Sketch:
    return Sketch(
        np.zeros(5, dtype=np.int64),
        np.empty(size, dtype=np.int32),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.zeros(1),
    )


@compiled
def plan_of(packed: Packed, first: NDArray[np.int64], groups: Integers, capacity: int) -> OrderState:
    """The state of valid orders, none longer than the capacity."""
    queues, size = len(first) - 1, len(packed.model)
    plan = OrderState(
        np.empty((queues, capacity), dtype=np.int32),
        np.zeros(queues, dtype=np.int32),
        np.empty((queues, capacity + 1)),
        np.empty((queues, capacity + 1)),
        np.empty((queues, capacity + 1)),
        np.empty((queues, capacity + 1)),
        np.zeros(queues),
        np.full(size, -1, dtype=np.int32),
        np.full(size, -1, dtype=np.int32),
    )
    sketch = empty_sketch(capacity)
    for queue in range(queues):
        plan.cost[queue, 0] = 0.0
        plan.start_s[queue, 0], plan.variance[queue, 0], plan.run_s[queue, 0] = 0.0, 0.0, 0.0
        length = first[queue + 1] - first[queue]
        sketch.groups[:length] = groups[first[queue] : first[queue + 1]]
        sketch.at[QUEUE], sketch.at[BEGIN], sketch.at[LENGTH], sketch.at[KEPT] = queue, 0, length, 0
        walk(packed, plan, sketch, np.inf)
        commit(plan, sketch)
    return plan


@lean
def queue_cost(plan: OrderState, queue: int) -> float:
    return float(plan.cost[queue, plan.size[queue]])


@lean
def plan_cost(plan: OrderState) -> float:
    total = 0.0
    for queue in range(len(plan.size)):
        total += queue_cost(plan, queue)
    return total


@compiled
def orders_in(order: NDArray[np.int32], size: Integers) -> tuple[NDArray[np.int64], Integers]:
    """Concatenates the rows of `order` [Q, capacity] with `size` groups each [Q]."""
    queues = len(size)
    first = np.zeros(queues + 1, dtype=np.int64)
    for queue in range(queues):
        first[queue + 1] = first[queue] + size[queue]
    groups = np.empty(first[queues], dtype=np.int32)
    for queue in range(queues):
        groups[first[queue] : first[queue + 1]] = order[queue, : size[queue]]
    return first, groups


@lean
def walk(packed: Packed, plan: OrderState, sketch: Sketch, allowance: float) -> float:
    """The added cost of a sketch; infinite once it is known to exceed the allowance: an unchanged tail that starts no earlier costs no
    less, except for the next load, which a longer run hides. (This holds for means; for late groups, more variance makes fewer late.)"""
    queue, begin, length = sketch.at[QUEUE], sketch.at[BEGIN], sketch.at[LENGTH]
    groups, starts, variances, runs, costs = sketch.groups, sketch.start_s, sketch.variance, sketch.run_s, sketch.cost
    size, kind = plan.size[queue], packed.kind[queue]
    was_start, was_variance, was_run, was_cost = plan.start_s[queue], plan.variance[queue], plan.run_s[queue], plan.cost[queue]
    on_kind, models, swaps, warms = packed.on_kind[kind], packed.model, packed.swap[queue], packed.warm[kind]
    work_weight = packed.weights[packing.WORK_WEIGHT]
    total_before = queue_cost(plan, queue)
    most = total_before + allowance
    aligned_from = length - sketch.at[KEPT]
    same_size = size == begin + length
    start_s, variance, run_s, busy_s, total = was_start[begin], was_variance[begin], was_run[begin], plan.busy_s[queue], was_cost[begin]
    before_model, drain_s, drain_variance = -1, 0.0, 0.0
    if begin > 0:
        before = plan.order[queue, begin - 1]
        before_model, drain_s, drain_variance = models[before], on_kind[before, packing.DRAIN], on_kind[before, packing.OWN_VARIANCE]
    for number in range(length):
        group = groups[number]
        model = models[group]
        if before_model < 0:
            start_s, variance, run_s, busy_s, swap_s, evicts = opening(packed, queue, group)
            total = front_cost(packed, queue, group, swap_s, evicts)
        elif model != before_model:
            end_s = max(start_s + drain_s, busy_s)
            swap_s = max(warms[model], swaps[model] - (end_s - run_s))
            start_s = run_s = end_s + swap_s
            variance += drain_variance
            total += work_weight * swap_s
        before_model = model
        total += cost_from(packed, kind, group, start_s, variance)
        work_s, work_variance = on_kind[group, packing.WORK], on_kind[group, packing.WORK_VARIANCE]
        drain_s, drain_variance = on_kind[group, packing.DRAIN], on_kind[group, packing.OWN_VARIANCE]
        start_s += work_s
        variance += work_variance
        if total > most:
            return np.inf
        starts[number], variances[number], runs[number], costs[number] = start_s, variance, run_s, total
        if number >= aligned_from:
            was = size - length + number + 1
            later_s, wider = start_s - was_start[was], variance - was_variance[was]
            if later_s > -SAME_S and wider > -SAME_S:
                more = total - was_cost[was]
                longer_s = later_s - (run_s - was_run[was])
                if more - work_weight * max(0.0, longer_s) > allowance:
                    return np.inf
                if same_size and later_s < SAME_S and wider < SAME_S and abs(run_s - was_run[was]) < SAME_S:
                    sketch.at[WALKED] = number + 1
                    sketch.busy_s[0] = busy_s
                    return float(more)
    sketch.at[WALKED] = length
    sketch.busy_s[0] = busy_s
    return float(total - total_before)


@lean
def commit(plan: OrderState, sketch: Sketch) -> None:
    """Applies a walked sketch to its queue."""
    queue, begin, length, walked = sketch.at[QUEUE], sketch.at[BEGIN], sketch.at[LENGTH], sketch.at[WALKED]
    more = 0.0
    if walked < length:
        more = sketch.cost[walked - 1] - plan.cost[queue, begin + walked]
    for number in range(walked):
        place = begin + number
        group = sketch.groups[number]
        plan.order[queue, place] = group
        plan.queue_of[group], plan.place_of[group] = queue, place
        plan.start_s[queue, place + 1], plan.variance[queue, place + 1] = sketch.start_s[number], sketch.variance[number]
        plan.run_s[queue, place + 1], plan.cost[queue, place + 1] = sketch.run_s[number], sketch.cost[number]
    for place in range(begin + walked, begin + length):
        plan.cost[queue, place + 1] += more
    plan.size[queue] = begin + length
    plan.busy_s[queue] = sketch.busy_s[0]
