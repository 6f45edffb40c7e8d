"""Orders as large moves change them: as `plan.Plan`, but all that is known of a place is in one row, with what the groups behind it cost
more at the least if they come later; a queue is changed where it stands and put back from a copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.compiled import compiled, lean
from qlm_planner.solver.cost import empty_cost, front_cost, opening
from qlm_planner.solver.packing import WORK_WEIGHT, Packed
from qlm_planner.solver.problem import Booleans, Floats, Integers
from qlm_planner.solver.terms import (
    T_COMPLETION,
    T_DONE,
    T_DRAIN,
    T_FIRST,
    T_HIGH,
    T_LATE,
    T_LOW,
    T_OWN_VARIANCE,
    T_STARVES,
    T_STARVING,
    T_STRETCH,
    T_TARDY,
    T_WORK,
    T_WORK_VARIANCE,
    lateness_cost,
)

(START, VARIANCE, RUN, COST, RATE, HIDDEN, SLACK, OWN_RATE) = range(8)
"""Columns of a place. Behind so many groups: when the next one starts, with the variance; when the run began; what the groups cost. Of the
groups from the place on: what a second later costs more at the least (tardiness is convex, and late requests become no fewer); by how much
the swap behind the run may still shrink if the run is longer; how much later the run may end before the engine has done what it does now.
Of the group there: its own part of the rate."""
COLUMNS = 8


class Lines(NamedTuple):
    """`order` [Q, capacity]; `at` [Q, capacity + 1, 8]; [Q]: `size`, `busy_s`. [G]: `queue_of`, `place_of` (-1 where it is on no queue)."""

    order: NDArray[np.int32]
    at: Floats
    size: Integers
    busy_s: Floats
    queue_of: Integers
    place_of: Integers


class Walks(NamedTuple):
    """Two walks over the end of a queue as it might be, the cheapest one so far and the next: `at` [2, capacity, 8], behind each group, but
    its own part of the rate beside it; `busy_s` [2], of a queue that is walked from its front."""

    at: Floats
    busy_s: Floats


@compiled
def no_walks(capacity: int) -> Walks:
    return Walks(np.zeros((2, capacity, COLUMNS)), np.zeros(2))


@compiled
def lines_of(packed: Packed, terms: Floats, first: NDArray[np.int64], groups: Integers, capacity: int) -> Lines:
    """Orders that are valid, none longer than the capacity."""
    queues, size = len(first) - 1, len(packed.model)
    lines = Lines(
        np.empty((queues, capacity), dtype=np.int32),
        np.zeros((queues, capacity + 1, COLUMNS)),
        np.zeros(queues, dtype=np.int32),
        np.zeros(queues),
        np.full(size, -1, dtype=np.int32),
        np.full(size, -1, dtype=np.int32),
    )
    for queue in range(queues):
        length = first[queue + 1] - first[queue]
        lines.order[queue, :length] = groups[first[queue] : first[queue + 1]]
        lines.size[queue] = length
        relay(packed, terms, lines, queue, 0)
    return lines


@lean
def line_cost(packed: Packed, lines: Lines, queue: int) -> float:
    size = lines.size[queue]
    return float(lines.at[queue, size, COST]) if size > 0 else empty_cost(packed, queue)


@lean
def lines_cost(packed: Packed, lines: Lines) -> float:
    total = 0.0
    for queue in range(len(lines.size)):
        total += line_cost(packed, lines, queue)
    return total


@lean
def relay(packed: Packed, terms: Floats, lines: Lines, queue: int, begin: int) -> None:
    """Works out a queue whose order has changed from a place on."""
    size, kind = lines.size[queue], packed.kind[queue]
    order, at = lines.order[queue], lines.at[queue]
    rows, models, swaps, warms = terms[kind], packed.model, packed.swap[queue], packed.warm[kind]
    work_weight = packed.weights[WORK_WEIGHT]
    start_s, variance, run_s, busy_s, total = at[begin, START], at[begin, VARIANCE], at[begin, RUN], lines.busy_s[queue], at[begin, COST]
    before_model, drain_s, drain_variance = -1, 0.0, 0.0
    if begin > 0:
        before = order[begin - 1]
        before_model, drain_s, drain_variance = models[before], rows[before, T_DRAIN], rows[before, T_OWN_VARIANCE]
    for place in range(begin, size):
        group = order[place]
        model = models[group]
        row = rows[group]
        if model != before_model:
            if before_model < 0:
                start_s, variance, run_s, busy_s, swap_s, gives_way = opening(packed, queue, group)
                total = front_cost(packed, queue, group, swap_s, gives_way)
                lines.busy_s[queue] = busy_s
            else:
                end_s = max(start_s + drain_s, busy_s)
                swap_s = max(warms[model], swaps[model] - (end_s - run_s))
                start_s = run_s = end_s + swap_s
                variance += drain_variance
                total += work_weight * swap_s
            before_model = model
        drain_s, drain_variance = row[T_DRAIN], row[T_OWN_VARIANCE]
        work_variance = row[T_WORK_VARIANCE]
        cost, rate = lateness_cost(
            start_s + row[T_LOW],
            start_s + row[T_HIGH],
            start_s + row[T_FIRST],
            row[T_STRETCH],
            variance + drain_variance,
            work_variance,
            row[T_LATE],
            row[T_TARDY],
        )
        total += cost + row[T_COMPLETION] * (start_s + row[T_DONE])
        rate += row[T_COMPLETION]
        starved_s = start_s + row[T_STARVES]
        start_s += row[T_WORK]
        variance += work_variance
        if starved_s > 0.0:
            total += row[T_STARVING] * starved_s
            rate += row[T_STARVING]
        at[place, OWN_RATE] = rate
        at[place + 1, START], at[place + 1, VARIANCE], at[place + 1, RUN], at[place + 1, COST] = start_s, variance, run_s, total
        lines.queue_of[group], lines.place_of[group] = queue, place
    rates(packed, terms, lines, queue)


@lean
def rates(packed: Packed, terms: Floats, lines: Lines, queue: int) -> None:
    """What the groups from each place on cost more at the least if they come later."""
    size, kind = lines.size[queue], packed.kind[queue]
    order, at, busy_s = lines.order[queue], lines.at[queue], lines.busy_s[queue]
    rows, models, warms = terms[kind], packed.model, packed.warm[kind]
    rate, hidden_s, slack_s, behind_model = 0.0, 0.0, 0.0, -1
    at[size, RATE], at[size, HIDDEN], at[size, SLACK] = 0.0, 0.0, 0.0
    for place in range(size - 1, -1, -1):
        group = order[place]
        model = models[group]
        if model != behind_model:
            if behind_model >= 0:
                end_s = at[place + 1, START] + rows[group, T_DRAIN]
                hidden_s = max(0.0, at[place + 2, RUN] - max(end_s, busy_s) - warms[behind_model])
                slack_s = max(0.0, busy_s - end_s)
            behind_model = model
        rate += at[place, OWN_RATE]
        at[place, RATE], at[place, HIDDEN], at[place, SLACK] = rate, hidden_s, slack_s


@lean
def copy_line(source: Lines, target: Lines, queue: int) -> None:
    size = source.size[queue]
    target.size[queue], target.busy_s[queue] = size, source.busy_s[queue]
    was, now, was_at, now_at = source.order[queue], target.order[queue], source.at[queue], target.at[queue]
    for place in range(size):
        now[place] = was[place]
    for place in range(size + 1):
        for column in range(COLUMNS):
            now_at[place, column] = was_at[place, column]


@lean
def put_back(lines: Lines, kept: Lines, touched: Booleans) -> None:
    """All queues as they were kept."""
    for queue in range(len(lines.size)):
        if touched[queue]:
            copy_line(kept, lines, queue)
            for place in range(lines.size[queue]):
                group = lines.order[queue, place]
                lines.queue_of[group], lines.place_of[group] = queue, place


@lean
def differs(lines: Lines, kept: Lines, queue: int) -> bool:
    """From how the queue was kept."""
    size, place = lines.size[queue], 0
    if size != kept.size[queue]:
        return True
    while place < size and lines.order[queue, place] == kept.order[queue, place]:
        place += 1
    return bool(place < size)


@lean
def put_in(
    packed: Packed,
    terms: Floats,
    lines: Lines,
    kept: Lines,
    touched: Booleans,
    queue: int,
    place: int,
    block: Integers,
    first: int,
    stop: int,
    walks: Walks,
    side: int,
) -> float:
    """The groups [first, stop) of the block to a place of a queue; what that costs more. `side`: of the walks, the one over the queue as it
    will be; -1 where there was none."""
    if not touched[queue]:
        touched[queue] = True
        copy_line(lines, kept, queue)
    before = line_cost(packed, lines, queue)
    size, inserted, order = lines.size[queue], stop - first, lines.order[queue]
    for other in range(size - 1, place - 1, -1):
        order[other + inserted] = order[other]
    for number in range(inserted):
        order[place + number] = block[first + number]
    size += inserted
    lines.size[queue] = size
    if side < 0:
        relay(packed, terms, lines, queue, place)
        return line_cost(packed, lines, queue) - before
    at, walked = lines.at[queue], walks.at[side]
    if place == 0:
        lines.busy_s[queue] = walks.busy_s[side]
    for spot in range(place, size):
        number = spot - place
        at[spot, OWN_RATE] = walked[number, OWN_RATE]
        at[spot + 1, START], at[spot + 1, VARIANCE] = walked[number, START], walked[number, VARIANCE]
        at[spot + 1, RUN], at[spot + 1, COST] = walked[number, RUN], walked[number, COST]
        group = order[spot]
        lines.queue_of[group], lines.place_of[group] = queue, spot
    rates(packed, terms, lines, queue)
    return line_cost(packed, lines, queue) - before


@lean
def take_out(
    packed: Packed, terms: Floats, lines: Lines, kept: Lines, touched: Booleans, out: Booleans, taken: Integers, count: int
) -> float:
    """The marked groups, that are listed too, leave their queues; what the lines cost more (less, as a rule)."""
    more = 0.0
    for number in range(count):
        queue = lines.queue_of[taken[number]]
        if queue < 0:
            continue
        if not touched[queue]:
            touched[queue] = True
            copy_line(lines, kept, queue)
        before = line_cost(packed, lines, queue)
        order, size, length, begin = lines.order[queue], lines.size[queue], 0, -1
        for place in range(size):
            group = order[place]
            if out[group]:
                lines.queue_of[group], lines.place_of[group] = -1, -1
                if begin < 0:
                    begin = place
            else:
                order[length] = group
                length += 1
        lines.size[queue] = length
        relay(packed, terms, lines, queue, begin)
        more += line_cost(packed, lines, queue) - before
    return more
