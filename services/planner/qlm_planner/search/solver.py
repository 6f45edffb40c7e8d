"""The solver as others call it: evaluate, construct, improve, solve. Deterministic; bounded by moves, never by time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlm_planner.cost import order_cost as of
from qlm_planner.search.annealing import anneal
from qlm_planner.search.compile_cache import FOLDER, alone, complete, mark_complete
from qlm_planner.search.construction import constructed, inserted
from qlm_planner.search.packing import DEADLINE, DRAIN, OWN, OWN_VARIANCE, REQUESTS, SPREAD, WORK, WORK_VARIANCE, Packed, packed
from qlm_planner.search.problem import Costs, Floats, Integers, Orders, Problem, ProblemError, Solution, Weights
from qlm_planner.search.random_numbers import chance_of

SPARE = 64
"""Places of a queue beyond what it needs, at least; beyond twice the mean too."""
CAPACITY_FACTOR = 4
HOT_MAX = 0.3
"""First temperature of a full annealing at the most, over what a group costs that is late. Fewer moves a group begin colder: from hot they
would not come back."""
HOT_AT = 0.002
HOT_MOVES = 40.0
"""So hot with so many moves a group, and with their square."""
MILD = 0.001
"""The same of a repair."""
MEAN_COSTS_MAX = 10.0
"""What a late group costs counts as so many mean costs of a group at the most: where nobody can be late, lateness is no measure."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Work:
    """A problem and its packed form, so that this is done once."""

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
        """From a temperature of so much of what a late group costs."""
        orders = start.orders
        if moves <= 0 or not orders.groups.size:
            return start
        late_cost = self.problem.weights.late * float(self.packed.group[:, REQUESTS].mean())
        mean_cost = max(start.cost.total, 1e-9) / orders.groups.size
        temperature = hot * min(late_cost or math.inf, MEAN_COSTS_MAX * mean_cost)
        capacity = self.capacity(orders.first)
        first, groups, _ = anneal(self.packed, orders.first, orders.groups, capacity, moves, temperature, chance_of(seed))
        found = self.solved(first, groups, rule)
        return found if found.cost.total < start.cost.total else start


def evaluate(problem: Problem, orders: Orders) -> Costs:
    """Raises ProblemError for orders that do not fit, or have a group where it cannot be served."""
    work = _Work.of(problem)
    orders.checked(problem)
    kinds = np.repeat(work.packed.kind, np.diff(orders.first))
    if not work.packed.serves[kinds, orders.groups].all():
        raise ProblemError("orders: a group is on a queue that cannot serve it")
    return _evaluated(work.packed, orders.first.astype(np.int64), orders.groups.astype(np.int32), problem.weights)[0]


def group_lateness(problem: Problem, orders: Orders) -> Floats:
    """Shares of requests that are expected to be late, and by how many seconds the latest of them is on average (below 0: early), of each
    group [G, 2]. Groups on no queue, or on one that cannot serve them, are late for ever. Raises ProblemError if orders do not fit."""
    work = _Work.of(problem)
    return _evaluated(work.packed, *_served(work, orders), problem.weights)[1]


def construct(problem: Problem) -> Solution:
    """Earliest deadline first, each group where it ends first: where annealing begins, and what to compare with."""
    work = _Work.of(problem)
    return work.solved(*constructed(work.packed), "edf")


def improve(problem: Problem, orders: Orders, *, moves: int, seed: int, hot: float = MILD) -> Solution:
    """Anneals from orders that are there. What they break is mended first: bands are sorted, groups that cannot be served where they are,
    or are on no queue, come to their best place. `hot`: the first temperature, over what a group costs that is late."""
    work = _Work.of(problem)
    start = _mended(work, orders)
    return work.annealed(start, moves, hot, seed, "improved")


def solve(problem: Problem, *, moves: int, seed: int) -> Solution:
    """Constructs and anneals."""
    work = _Work.of(problem)
    found = work.solved(*constructed(work.packed), "edf")
    hot = min(HOT_MAX, HOT_AT * (moves / max(1, problem.groups) / HOT_MOVES) ** 2)
    return work.annealed(found, moves, hot, seed, "annealed")


def warm_up() -> float:
    """Loads all of it from the cache, or compiles it, one process at a time; returns the seconds that took."""
    began_s = time.perf_counter()
    if complete():
        _use_all()
    else:
        with alone() as held:
            _use_all()
            if held and FOLDER is not None:
                mark_complete(FOLDER)
    return time.perf_counter() - began_s


def _evaluated(packed: Packed, first: NDArray[np.int64], groups: Integers, weights: Weights) -> tuple[Costs, Floats]:
    """The cost of orders that fit and are valid, with no group where it cannot be served; and of each group [G, 2] the share of its
    requests that is expected to be late, and by how many seconds the latest is on average. Groups on no queue are late for ever."""
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
    """Orders without the groups that cannot be served where they are."""
    orders.checked(work.problem)
    queue = np.repeat(np.arange(work.problem.queues), np.diff(orders.first))
    groups = orders.groups.astype(np.int32)
    kept = work.packed.serves[work.packed.kind[queue], groups]
    return np.searchsorted(queue[kept], np.arange(work.problem.queues + 1)).astype(np.int64), groups[kept]


def _mended(work: _Work, orders: Orders) -> Solution:
    """Valid orders of all groups that can be served."""
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


def _use_all() -> None:
    problem = _tiny()
    solved = solve(problem, moves=40, seed=0)
    evaluate(problem, solved.orders)
    left = Orders.of([[group for group in queue if group] for queue in solved.orders.lists()])
    improve(problem, left, moves=4, seed=0)


def _tiny() -> Problem:
    """Two queues, three groups: every branch is compiled in any case."""
    groups, queues, models = 3, 2, 2
    each = np.ones(groups)
    one = np.ones((1, groups))
    return Problem(
        model=np.array([0, 1, 0], dtype=np.int32),
        band=np.zeros(groups, dtype=np.int32),
        count=each,
        deadline_s=np.array([1.0, 2.0, math.inf]),
        spread_s=0.0 * each,
        slo_s=each,
        weight=each,
        work_s=one,
        work_variance=one,
        own_s=one,
        own_variance=one,
        drain_s=one,
        cold_s=np.ones((1, models)),
        warm_s=np.ones((1, models)),
        kind=np.zeros(queues, dtype=np.int32),
        active=np.array([0, -1], dtype=np.int32),
        lead_s=np.zeros(queues),
        lead_variance=np.zeros(queues),
        drain_lead_s=np.zeros(queues),
        drain_lead_variance=np.zeros(queues),
        warm=np.zeros((queues, models), dtype=np.bool_),
        head=np.array([0, -1], dtype=np.int32),
        clear_cost=np.full(queues, math.inf),
        leave_cost=np.zeros(queues),
    )
