"""The best place for one more group: every place of every queue is tried."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.compiled import compiled, lean
from qlm_planner.solver.moves import fill, fits_between, seal
from qlm_planner.solver.packing import Packed
from qlm_planner.solver.plan import Plan, Sketch, commit, empty_sketch, orders_in, plan_of, walk
from qlm_planner.solver.problem import Integers


@compiled
def inserted(
    packed: Packed, first: NDArray[np.int64], groups: Integers, capacity: int, new: Integers
) -> tuple[NDArray[np.int64], Integers]:
    """Each of the groups in turn at its cheapest place (equal ones: the first queue, the last place). Those that no queue can serve are
    left out."""
    plan = plan_of(packed, first, groups, capacity)
    sketch = empty_sketch(capacity + 1)
    for group in new:
        best_queue, best_place, best = -1, -1, np.inf
        for queue in range(len(plan.size)):
            if not packed.serves[packed.kind[queue], group] or plan.size[queue] == capacity:
                continue
            for place in range(plan.size[queue], -1, -1):
                if not fits_between(packed, plan, queue, place, group):
                    continue
                more = _walk_with(packed, plan, queue, place, group, sketch, best)
                if more < best:
                    best_queue, best_place, best = queue, place, more
        if best_queue >= 0:
            _walk_with(packed, plan, best_queue, best_place, group, sketch, np.inf)
            commit(plan, sketch)
    return orders_in(plan.order, plan.size)


@lean
def _walk_with(packed: Packed, plan: Plan, queue: int, place: int, group: int, sketch: Sketch, allowance: float) -> float:
    sketch.groups[0] = group
    length = fill(sketch, plan, 1, queue, place, plan.size[queue])
    seal(sketch, queue, place, length, length - 1)
    return walk(packed, plan, sketch, allowance)
