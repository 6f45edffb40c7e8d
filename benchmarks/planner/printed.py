"""Equation 13 as printed (QLM section 7), to its proven optimum for twice as many groups as the program can: by sets of groups.

The sum of completion times asks of a run only how long it holds up how many that are left. So the cheapest order of a set of groups behind
a run of a model is the same whenever that is, and a dynamic program over sets has it; all that depends on the time is the front of a queue,
where what runs now may end later than the first run. Within a run groups go by their work, but for the last one, whose drain counts, and
the first one of a queue, which may displace running requests. Starts, drains and swaps as in `program`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.enumeration import best_split
from qlm_planner.search.compile_cache import compiled, lean
from qlm_planner.search.group_cost import opening
from qlm_planner.search.packing import DRAIN, OWN, WORK, Packed, packed
from qlm_planner.search.problem import Booleans, Floats, Integers, Orders, Problem, Solution
from qlm_planner.search.solver import evaluate

GROUPS_MAX = 16
"""All pairs of a set and a part of it are examined: three times as many for each group more."""

Masks = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Printed:
    """`objective`: the sum of all completion times, of all groups that can be served."""

    solved: Solution
    objective: float


def printed_optimum(problem: Problem) -> Printed:
    """The orders of the least sum of completion times. Raises ValueError, for bands too: they are not in the equation."""
    arrays = packed(problem)
    able = np.flatnonzero(arrays.serves[arrays.kind].any(axis=0)).astype(np.int32)
    if len(able) > GROUPS_MAX:
        raise ValueError(f"all sets of {len(able)} groups: at most {GROUPS_MAX} can be tried")
    if len(np.unique(arrays.band[able])) > 1:
        raise ValueError("all sets of groups of several bands")
    lines = [_Line.of(arrays, queue, able) for queue in range(problem.queues)]
    costs = np.stack([line.cost for line in lines])
    chosen = best_split(costs)
    orders = Orders.of([[int(able[number]) for number in line.order(int(own))] for line, own in zip(lines, chosen, strict=True)])
    solved = Solution(orders=orders, cost=evaluate(problem, orders), rule="equation 13")
    return Printed(solved=solved, objective=float(costs[np.arange(problem.queues), chosen].sum()))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Line:
    """A queue, for all sets of groups: `cost` [sets]; `front` [sets], the groups of the first run; `behind` [models, sets], those of the
    next run behind one of that model. The rest is of the groups, as they stand on the queue."""

    cost: Floats
    front: Masks
    behind: Masks
    work: Floats
    own: Floats
    drain: Floats
    turn: Integers
    model: Integers
    start: Floats
    busy: Floats

    @classmethod
    def of(cls, arrays: Packed, queue: int, able: Integers) -> _Line:
        kind = arrays.kind[queue]
        work, own, drain = (np.ascontiguousarray(arrays.on_kind[kind, able, column]) for column in (WORK, OWN, DRAIN))
        serves = np.ascontiguousarray(arrays.serves[kind, able])
        start, busy = np.zeros(len(able)), np.zeros(len(able))
        for number in np.flatnonzero(serves):
            start[number], _, _, busy[number], _, _ = opening(arrays, queue, int(able[number]))
        turn = np.argsort(work, kind="stable").astype(np.int32)
        model, swap = arrays.model[able], np.ascontiguousarray(arrays.swap[queue])
        cost, front, behind = _sets(work, own, drain, serves, turn, model, swap, start, busy)
        return cls(cost=cost, front=front, behind=behind, work=work, own=own, drain=drain, turn=turn, model=model, start=start, busy=busy)

    def order(self, members: int) -> list[int]:
        found: list[int] = []
        run, left = int(self.front[members]), members
        opens = True
        while left:
            left ^= run
            first, last = _ends(run, left.bit_count(), opens, self.work, self.own, self.drain, self.turn, self.start, self.busy)[1:]
            inner = [int(number) for number in self.turn if run >> int(number) & 1 and number not in (first, last)]
            found += [first, *inner, last] if first != last and first >= 0 else [*inner, last]
            opens = False
            run = int(self.behind[self.model[last], left])
        return found


@lean
def _completions(members: int, first: int, last: int, work: Floats, own: Floats, turn: Integers) -> tuple[float, float]:
    """A run from its start on: the sum over its groups, and its duration. `first`: -1 where any may be it."""
    total, time_s = 0.0, 0.0
    if first >= 0 and first != last:
        time_s += work[first]
        total += time_s + own[first]
    for number in turn:
        if members >> number & 1 and number != first and number != last:
            time_s += work[number]
            total += time_s + own[number]
    time_s += work[last]
    return total + time_s + own[last], time_s


@lean
def _ends(
    members: int, left: int, opens: bool, work: Floats, own: Floats, drain: Floats, turn: Integers, start: Floats, busy: Floats
) -> tuple[float, int, int]:
    """The least cost of a run with so many groups left behind it, which wait for it and its drain; which group is first (-1 where it
    is the next by work: the run does not open the queue), and which is last."""
    best, best_first, best_last, size = np.inf, -1, -1, 0
    for number in turn:
        size += members >> number & 1
    for last in turn:
        if not members >> last & 1:
            continue
        if not opens:
            total, took_s = _completions(members, -1, last, work, own, turn)
            total += left * (took_s + drain[last])
            if total < best:
                best, best_last = total, last
            continue
        for first in turn:
            if not members >> first & 1 or (first == last and size > 1):
                continue
            total, took_s = _completions(members, first, last, work, own, turn)
            total += size * start[first] + left * max(start[first] + took_s + drain[last], busy[first])
            if total < best:
                best, best_first, best_last = total, first, last
    return best, best_first, best_last


@compiled
def _sets(
    work: Floats,
    own: Floats,
    drain: Floats,
    serves: Booleans,
    turn: Integers,
    model: Integers,
    swap: Floats,
    start: Floats,
    busy: Floats,
) -> tuple[Floats, Masks, Masks]:
    """The cost of each set on the queue, its first run, and the next run of what is left behind a run of each model."""
    size, models = len(model), len(swap)
    sets = 1 << size
    of_model = np.zeros(models, dtype=np.int32)
    for number in range(size):
        if serves[number]:
            of_model[model[number]] |= 1 << number
    counts = np.zeros(sets, dtype=np.int32)
    for members in range(1, sets):
        counts[members] = counts[members >> 1] + (members & 1)
    # The cost of a run, by how many are left behind it.
    run, opened = np.full((sets, size + 1), np.inf), np.full((sets, size + 1), np.inf)
    for each in range(models):
        part = of_model[each]
        while part:
            for left in range(size - counts[part] + 1):
                run[part, left] = _ends(part, left, False, work, own, drain, turn, start, busy)[0]
                opened[part, left] = _ends(part, left, True, work, own, drain, turn, start, busy)[0]
            part = (part - 1) & of_model[each]
    goes_on, behind = np.full((models, sets), np.inf), np.zeros((models, sets), dtype=np.int32)
    cost, front = np.full(sets, np.inf), np.zeros(sets, dtype=np.int32)
    goes_on[:, 0], cost[0] = 0.0, 0.0
    for members in range(1, sets):
        for each in range(models):
            part = own_part = members & of_model[each]
            least, least_part = np.inf, 0
            while part:
                left = members ^ part
                rest = goes_on[each, left]
                more = run[part, counts[left]] + rest
                if more < least:
                    least, least_part = more, part
                more = opened[part, counts[left]] + rest
                if more < cost[members]:
                    cost[members], front[members] = more, part
                part = (part - 1) & own_part
            least += counts[members] * swap[each]
            for other in range(models):
                if other != each and least < goes_on[other, members]:
                    goes_on[other, members], behind[other, members] = least, least_part
    return cost, front, behind
