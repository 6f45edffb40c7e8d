"""What a large move takes out of the queues: groups that have to do with each other, since only those can gain by
being placed anew together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.chance import State, below, uniform
from qlm_planner.solver.compiled import lean
from qlm_planner.solver.lines import START, Lines
from qlm_planner.solver.packing import Packed
from qlm_planner.solver.problem import Booleans, Integers

OUT_MAX = 32
"""Groups that are taken out together at the most."""
MODEL_SHARE, STRINGS_SHARE, RUNS_SHARE = 0.1, 0.8, 0.1
"""Of the choices: groups of one model; groups in a row on two queues, at about the same time; two whole runs."""


@lean
def chosen(
    packed: Packed,
    lines: Lines,
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
            if lines.queue_of[group] >= 0:
                size = _mark(group, out, found, size)
        return size
    queue, place = lines.queue_of[seed], lines.place_of[seed]
    if kind < MODEL_SHARE + STRINGS_SHARE:
        time_s = lines.at[queue, place, START]
        each = max(1, most // 2)
        size = _string(lines, chance, queue, time_s, each, out, found, 0)
        other = below(chance, len(lines.size))
        return size if other == queue else _string(lines, chance, other, time_s, each, out, found, size)
    if kind < MODEL_SHARE + STRINGS_SHARE + RUNS_SHARE:
        size = _run(packed, lines, seed, out, found, 0)
        return _run(packed, lines, groups[below(chance, len(groups))], out, found, size)
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
def _string(lines: Lines, chance: State, queue: int, time_s: float, most: int, out: Booleans, found: Integers, size: int) -> int:
    """Up to so many groups in a row, about those that are served at a time."""
    place = 0
    while place < lines.size[queue] and lines.at[queue, place, START] < time_s:
        place += 1
    begin = max(0, place - below(chance, most) - 1)
    for at in range(begin, min(lines.size[queue], begin + most)):
        size = _mark(lines.order[queue, at], out, found, size)
    return size


@lean
def _run(packed: Packed, lines: Lines, group: int, out: Booleans, found: Integers, size: int) -> int:
    """The run that the group is in."""
    order, model = lines.order[lines.queue_of[group]], packed.model[group]
    begin, end = lines.place_of[group], lines.size[lines.queue_of[group]]
    while begin > 0 and packed.model[order[begin - 1]] == model:
        begin -= 1
    while begin < end and packed.model[order[begin]] == model:
        size = _mark(order[begin], out, found, size)
        begin += 1
    return size
