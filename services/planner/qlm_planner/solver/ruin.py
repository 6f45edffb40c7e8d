"""What a large move takes out of the queues, and how it is taken back: groups that have to do with each other, since only those can gain by
being placed anew together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.chance import State, below, uniform
from qlm_planner.solver.compiled import lean
from qlm_planner.solver.moves import run_begin, run_end, seal
from qlm_planner.solver.packing import Packed
from qlm_planner.solver.plan import Plan, Sketch, commit, walk
from qlm_planner.solver.problem import Booleans, Integers

OUT_MAX = 32
"""Groups that are taken out together at the most."""
MODEL_SHARE, STRINGS_SHARE, RUNS_SHARE = 0.1, 0.8, 0.1
"""Of the choices: groups of one model; groups in a row on two queues, at about the same time; two whole runs."""


@lean
def keep_queue(plan: Plan, kept: Plan, touched: Booleans, queue: int) -> None:
    """The queue as it is, once a move."""
    if touched[queue]:
        return
    touched[queue] = True
    _copy(plan, kept, queue)


@lean
def put_back(plan: Plan, kept: Plan, touched: Booleans) -> None:
    """All queues as they were kept."""
    for queue in range(len(plan.size)):
        if touched[queue]:
            _copy(kept, plan, queue)
            for place in range(plan.size[queue]):
                group = plan.order[queue, place]
                plan.queue_of[group], plan.place_of[group] = queue, place


@lean
def _copy(source: Plan, target: Plan, queue: int) -> None:
    size = source.size[queue]
    target.size[queue], target.busy_s[queue] = size, source.busy_s[queue]
    for place in range(size):
        target.order[queue, place] = source.order[queue, place]
    for place in range(size + 1):
        target.start_s[queue, place], target.variance[queue, place] = source.start_s[queue, place], source.variance[queue, place]
        target.run_s[queue, place], target.cost[queue, place] = source.run_s[queue, place], source.cost[queue, place]


@lean
def take_out(packed: Packed, plan: Plan, kept: Plan, touched: Booleans, out: Booleans, sketch: Sketch) -> float:
    """The marked groups leave their queues; what the plan costs more (less, as a rule)."""
    more = 0.0
    for queue in range(len(plan.size)):
        size, begin = plan.size[queue], 0
        while begin < size and not out[plan.order[queue, begin]]:
            begin += 1
        if begin == size:
            continue
        keep_queue(plan, kept, touched, queue)
        length, last = 0, 0
        for place in range(begin, size):
            group = plan.order[queue, place]
            if out[group]:
                plan.queue_of[group], plan.place_of[group], last = -1, -1, 0
            else:
                sketch.groups[length] = group
                length += 1
                last += 1
        seal(sketch, queue, begin, length, last)
        more += walk(packed, plan, sketch, np.inf)
        commit(plan, sketch)
    return more


@lean
def chosen(
    packed: Packed,
    plan: Plan,
    chance: State,
    groups: Integers,
    of_model: Integers,
    model_first: NDArray[np.int64],
    out: Booleans,
    found: Integers,
) -> int:
    """Marks what a move takes out and lists it, in the order of the queues. How many."""
    seed = groups[below(chance, len(groups))]
    most = 2 + below(chance, min(OUT_MAX, len(groups) + 1) - 1)
    kind = uniform(chance)
    if kind < MODEL_SHARE:
        begin, end = model_first[packed.model[seed]], model_first[packed.model[seed] + 1]
        offset, size = below(chance, end - begin), 0
        for number in range(min(most, end - begin)):
            group = of_model[begin + (number + offset) % (end - begin)]
            if plan.queue_of[group] >= 0:
                size = _mark(group, out, found, size)
        return size
    queue, place = plan.queue_of[seed], plan.place_of[seed]
    if kind < MODEL_SHARE + STRINGS_SHARE:
        time_s = plan.start_s[queue, place]
        each = max(1, most // 2)
        size = _string(plan, chance, queue, time_s, each, out, found, 0)
        other = below(chance, len(plan.size))
        return size if other == queue else _string(plan, chance, other, time_s, each, out, found, size)
    if kind < MODEL_SHARE + STRINGS_SHARE + RUNS_SHARE:
        size = _run(packed, plan, seed, out, found, 0)
        return _run(packed, plan, groups[below(chance, len(groups))], out, found, size)
    size = 0
    for _ in range(most):
        size = _mark(groups[below(chance, len(groups))], out, found, size)
    return size


@lean
def _mark(group: int, out: Booleans, found: Integers, size: int) -> int:
    if out[group] or size == len(found):
        return size
    out[group] = True
    found[size] = group
    return size + 1


@lean
def _string(plan: Plan, chance: State, queue: int, time_s: float, most: int, out: Booleans, found: Integers, size: int) -> int:
    """Up to so many groups in a row, about those that are served at a time."""
    place = 0
    while place < plan.size[queue] and plan.start_s[queue, place] < time_s:
        place += 1
    begin = max(0, place - below(chance, most) - 1)
    for at in range(begin, min(plan.size[queue], begin + most)):
        size = _mark(plan.order[queue, at], out, found, size)
    return size


@lean
def _run(packed: Packed, plan: Plan, group: int, out: Booleans, found: Integers, size: int) -> int:
    """The run that the group is in."""
    queue, place = plan.queue_of[group], plan.place_of[group]
    for at in range(run_begin(packed, plan, queue, place), run_end(packed, plan, queue, place)):
        size = _mark(plan.order[queue, at], out, found, size)
    return size
