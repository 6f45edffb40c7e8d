"""The solver's functions: evaluate, construct, improve, solve. Deterministic; bounded by moves, never by time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlm_planner.cost import order_cost as of
from qlm_planner.search.annealing import anneal
from qlm_planner.search.construction import constructed, inserted
from qlm_planner.search.packing import DEADLINE, DRAIN, OWN, OWN_VARIANCE, REQUESTS, SPREAD, WORK, WORK_VARIANCE, Packed, packed
from qlm_planner.search.problem import Costs, Floats, Integers, Orders, Problem, ProblemError, Solution, Weights
from qlm_planner.search.random_numbers import chance_of

SPARE = 64
"""Least positions of a queue beyond its need, and beyond CAPACITY_FACTOR times the mean."""
CAPACITY_FACTOR = 4
HOT_MAX = 0.3
"""Highest first temperature of an annealing, over the cost of a late group. Few moves a group start colder: hot orders would not
recover."""
HOT_AT = 0.002
HOT_MOVES = 40.0
"""First temperature HOT_AT for HOT_MOVES moves a group; it grows with their square."""
MILD = 0.001
"""First temperature of a repair."""
MEAN_COSTS_MAX = 10.0
"""Most mean costs of a group that the cost of a late one counts as: where no group can be late, lateness is no measure."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Work:
    """A problem and its packed form."""

    problem: Problem
    packed: Packed

    @classmethod
    def of(cls, problem: Problem) -> _Work:
        return cls(problem=problem, packed=packed(problem))

    def solved(self, first: NDArray[np.int64], groups: Integers, rule: str) -> Solution:
        return Solution(
            orders=Orders(first=first, groups=groups), cost=_evaluated(self.packed, first, groups, self.problem.weights)[0], rule=rule
        )

    def capacity(self, first: NDArray[np.int64], more: int = 0) -> int:
        size = self.problem.groups
        longest = int(np.diff(first).max(initial=0))
        return max(1, min(size, max(longest + more, CAPACITY_FACTOR * size // self.problem.queues) + SPARE))

    def annealed(self, start: Solution, moves: int, hot: float, seed: int, rule: str) -> Solution:
        """Anneals from a temperature `hot`, over the cost of a late group."""
        orders = start.orders
        if moves <= 0 or not orders.groups.size:
            return start
        late_cost = self.problem.weights.late * float(self.packed.group[:, REQUESTS].mean())
        mean_cost = max(start.cost.total, 1e-9) / orders.groups.size
        temperature = hot * min(late_cost or math.inf, MEAN_COSTS_MAX * mean_cost)
        capacity = self.capacity(orders.first)
        first, groups, _ = anneal(self.packed, orders.first, orders.groups, capacity, moves, temperature, chance_of(seed))
        if np.array_equal(groups, orders.groups) and np.array_equal(first, orders.first):
            return start
        found = self.solved(first, groups, rule)
        return found if found.cost.total < start.cost.total else start


def evaluate(problem: Problem, orders: Orders) -> Costs:
    """The cost of orders. Raises ProblemError if they do not fit, or have a group where it cannot be served."""
    work = _Work.of(problem)
    orders.checked(problem)
    kinds = np.repeat(work.packed.kind, np.diff(orders.first))
    if not work.packed.serves[kinds, orders.groups].all():
        raise ProblemError("orders: a group is on a queue that cannot serve it")
    return _evaluated(work.packed, orders.first.astype(np.int64), orders.groups.astype(np.int32), problem.weights)[0]


def group_lateness(problem: Problem, orders: Orders) -> Floats:
    """Returns for each group [G, 2] the expected share of late requests, and the mean delay of the latest in seconds (below 0: early).
    Groups on no queue, or on one that cannot serve them, have an infinite delay. Raises ProblemError for orders that do not fit."""
    work = _Work.of(problem)
    return _evaluated(work.packed, *_served(work, orders), problem.weights)[1]


def construct(problem: Problem) -> Solution:
    """Earliest deadline first, each group where it ends first: the start of annealing, and a baseline."""
    work = _Work.of(problem)
    return work.solved(*constructed(work.packed), "edf")


def improve(problem: Problem, orders: Orders, *, moves: int, seed: int, hot: float = MILD) -> Solution:
    """Anneals present orders, repaired first: bands are sorted, misplaced and missing groups are inserted at their cheapest position.
    `hot`: the first temperature, over the cost of a late group."""
    work = _Work.of(problem)
    start = _mended(work, orders)
    return work.annealed(start, moves, hot, seed, "improved")


def solve(problem: Problem, *, moves: int, seed: int) -> Solution:
    """Constructs and anneals."""
    work = _Work.of(problem)
    found = work.solved(*constructed(work.packed), "edf")
    hot = min(HOT_MAX, HOT_AT * (moves / max(1, problem.groups) / HOT_MOVES) ** 2)
    return work.annealed(found, moves, hot, seed, "annealed")


def _evaluated(packed: Packed, first: NDArray[np.int64], groups: Integers, weights: Weights) -> tuple[Costs, Floats]:
    """The cost of valid orders, and `group_lateness` of them [G, 2]."""
    queue = np.arange(len(packed.kind)).repeat(np.diff(first))
    model = packed.model[groups]
    rows = np.zeros((of.GROUP_ROWS, len(groups)))
    on_kind, group = packed.on_kind[packed.kind[queue], groups], packed.group[groups]
    rows[[of.WORK, of.WORK_VARIANCE, of.OWN, of.OWN_VARIANCE, of.DRAIN]] = on_kind[:, [WORK, WORK_VARIANCE, OWN, OWN_VARIANCE, DRAIN]].T
    rows[[of.REQUESTS, of.DEADLINE, of.SPREAD]] = group[:, [REQUESTS, DEADLINE, SPREAD]].T
    rows[of.SWAP], rows[of.WARM] = packed.swap[queue, model], packed.warm[packed.kind[queue], model]
    rows[of.MODEL], rows[of.BAND] = model, packed.band[groups]
    engines = np.concatenate((packed.queue.T, [packed.active]))
    times = of.order_times(rows, queue, engines, weights)
    each = np.ones((len(packed.model), 2))
    each[:, 1] = np.inf
    each[groups] = np.array((times.late, times.latest_s - rows[of.DEADLINE])).T
    return times.costs(), each


def _served(work: _Work, orders: Orders) -> tuple[NDArray[np.int64], Integers]:
    """Orders without misplaced groups."""
    orders.checked(work.problem)
    queue = np.repeat(np.arange(work.problem.queues), np.diff(orders.first))
    groups = orders.groups.astype(np.int32)
    kept = work.packed.serves[work.packed.kind[queue], groups]
    return np.searchsorted(queue[kept], np.arange(work.problem.queues + 1)).astype(np.int64), groups[kept]


def _mended(work: _Work, orders: Orders) -> Solution:
    """Valid orders of all servable groups."""
    problem = work.problem
    first, groups = _served(work, orders)
    queue = np.repeat(np.arange(problem.queues), np.diff(first))
    groups = groups[np.lexsort((np.arange(groups.size), work.packed.band[groups], queue))]
    missing = np.setdiff1d(np.arange(problem.groups, dtype=np.int32), groups)
    if missing.size:
        turn = np.lexsort((problem.deadline_s[missing], problem.band[missing]))
        capacity = work.capacity(first, missing.size)
        first, groups = inserted(work.packed, first, groups, capacity, missing[turn])
    return work.solved(first, groups, "as it was")
