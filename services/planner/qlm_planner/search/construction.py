"""Orders without a search: a whole plan as the start of the annealing, and single groups inserted into orders."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qlm_planner.search.compile_cache import compiled, lean
from qlm_planner.search.moves import fill, fits_in_place, seal
from qlm_planner.search.order_state import OrderState, Sketch, commit, empty_sketch, orders_in, plan_of, walk
from qlm_planner.search.packing import DEADLINE, DRAIN, DRAIN_LEAD, LEAD, WORK, Packed
from qlm_planner.search.problem import Integers


def constructed(packed: Packed) -> tuple[NDArray[np.int64], Integers]:
    """Orders by band and deadline, each group where it ends first by the means: the first index of each queue, and the groups."""
    return _construct(packed, np.lexsort((packed.group[:, DEADLINE], packed.band)).astype(np.int32))


@compiled
def _construct(packed: Packed, turn: Integers) -> tuple[NDArray[np.int64], Integers]:
    queues = len(packed.kind)
    model, drain, free = packed.active.copy(), np.zeros(queues), np.empty(queues)
    for queue in range(queues):
        free[queue] = packed.queue[queue, LEAD] if model[queue] >= 0 else packed.queue[queue, DRAIN_LEAD]
    on = np.full(len(turn), -1, dtype=np.int32)
    first = np.zeros(queues + 1, dtype=np.int64)
    heads = np.full(len(turn), -1, dtype=np.int32)
    for queue in range(queues):
        head = packed.head[queue]
        # A head is fixed unless a higher band waits, which may precede it.
        if head >= 0 and packed.serves[packed.kind[queue], head] and packed.band[head] == packed.band[turn[0]]:
            heads[head] = queue
    for seated in (True, False):
        for group in turn:
            if (heads[group] >= 0) != seated:
                continue
            best, best_end_s = -1, np.inf
            for queue in range(queues):
                if not packed.serves[packed.kind[queue], group] or (seated and queue != heads[group]):
                    continue
                end_s = free[queue] + packed.on_kind[packed.kind[queue], group, WORK]
                if model[queue] != packed.model[group]:
                    end_s += max(drain[queue], packed.queue[queue, DRAIN_LEAD] - free[queue]) + packed.swap[queue, packed.model[group]]
                if end_s < best_end_s:
                    best, best_end_s = queue, end_s
            on[group] = best
            if best >= 0:
                first[best + 1] += 1
                free[best], drain[best], model[best] = best_end_s, packed.on_kind[packed.kind[best], group, DRAIN], packed.model[group]
    for queue in range(queues):
        first[queue + 1] += first[queue]
    groups, at = np.empty(first[queues], dtype=np.int32), first[:-1].copy()
    for seated in (True, False):
        for group in turn:
            if on[group] >= 0 and (heads[group] >= 0) == seated:
                groups[at[on[group]]] = group
                at[on[group]] += 1
    return first, groups


@compiled
def inserted(
    packed: Packed, first: NDArray[np.int64], groups: Integers, capacity: int, new: Integers
) -> tuple[NDArray[np.int64], Integers]:
    """Inserts each of `new` at its cheapest position (equal ones: the first queue, the last position). Leaves out groups that no queue can
    serve."""
    plan = plan_of(packed, first, groups, capacity)
    sketch = empty_sketch(capacity + 1)
    for group in new:
        best_queue, best_place, best = -1, -1, np.inf
        for queue in range(len(plan.size)):
            if not packed.serves[packed.kind[queue], group] or plan.size[queue] == capacity:
                continue
            for place in range(plan.size[queue], -1, -1):
                if not fits_in_place(packed, plan, queue, place, place, packed.band[group], packed.band[group]):
                    continue
                more = _walk_with(packed, plan, queue, place, group, sketch, best)
                if more < best:
                    best_queue, best_place, best = queue, place, more
        if best_queue >= 0:
            _walk_with(packed, plan, best_queue, best_place, group, sketch, np.inf)
            commit(plan, sketch)
    return orders_in(plan.order, plan.size)


@lean
def _walk_with(packed: Packed, plan: OrderState, queue: int, place: int, group: int, sketch: Sketch, allowance: float) -> float:
    sketch.groups[0] = group
    length = fill(sketch, plan, 1, queue, place, plan.size[queue])
    seal(sketch, queue, place, length, length - 1)
    return walk(packed, plan, sketch, allowance)
