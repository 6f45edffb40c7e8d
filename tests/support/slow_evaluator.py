"""The cost of orders in plain Python, straight from the design and the fields of a problem: what the compiled solver is held to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations
from statistics import NormalDist

import numpy as np

from qlm_planner.search import Orders, Problem

NORMAL = NormalDist()
SHARES = (0.125, 0.375, 0.625, 0.875)


def slow_cost(problem: Problem, orders: Orders) -> float:
    """The objective."""
    return sum(_queue_cost(problem, queue, groups) for queue, groups in enumerate(orders.lists()))


def _queue_cost(problem: Problem, queue: int, groups: list[int]) -> float:
    weights, kind = problem.weights, int(problem.kind[queue])
    if not groups:
        return 0.0
    cost = 0.0
    active = int(problem.active[queue])
    start_s, variance, run_s, busy_s = 0.0, 0.0, 0.0, float(problem.drain_lead_s[queue])
    before = -1
    for group in groups:
        model = int(problem.model[group])
        cold_s = float(
            problem.warm_s[kind, model] if problem.warm[queue, model] else max(problem.cold_s[kind, model], problem.warm_s[kind, model])
        )
        warm_s = float(problem.warm_s[kind, model])
        if before < 0 and model == active:
            start_s, variance = float(problem.lead_s[queue]), float(problem.lead_variance[queue])
        elif before < 0:
            swap_s = max(warm_s, cold_s - busy_s)
            ready_s, variance = busy_s, float(problem.drain_lead_variance[queue])
            if _evicts(problem, queue, group, busy_s + swap_s, max(warm_s, cold_s)):
                ready_s, variance, busy_s = 0.0, 0.0, 0.0
                swap_s = max(warm_s, cold_s)
                cost += float(problem.clear_cost[queue])
            start_s = run_s = ready_s + swap_s
            cost += weights.work * swap_s if active >= 0 else 0.0
        elif model != problem.model[before]:
            end_s = max(start_s + float(problem.drain_s[kind, before]), busy_s)
            swap_s = max(warm_s, cold_s - (end_s - run_s))
            start_s = run_s = end_s + swap_s
            variance += float(problem.own_variance[kind, before])
            cost += weights.work * swap_s
        if before < 0 and model != active:
            cost += float(problem.leave_cost[queue])
        cost += _group_cost(problem, kind, group, start_s, variance)
        start_s += float(problem.work_s[kind, group])
        variance += float(problem.work_variance[kind, group])
        before = group
    return cost


def _evicts(problem: Problem, queue: int, group: int, behind_s: float, evicted_s: float) -> bool:
    """The head wins more than the eviction costs where it starts at `evicted_s`, not at `behind_s`."""
    if evicted_s >= behind_s or math.isinf(problem.clear_cost[queue]):
        return False
    kind, swap_s = int(problem.kind[queue]), behind_s - float(problem.drain_lead_s[queue])
    behind = _group_cost(problem, kind, group, behind_s, float(problem.drain_lead_variance[queue]))
    saved = behind - _group_cost(problem, kind, group, evicted_s, 0.0)
    return saved > problem.weights.work * (evicted_s - swap_s) + float(problem.clear_cost[queue])


def _group_cost(problem: Problem, kind: int, group: int, start_s: float, variance: float) -> float:
    weights = problem.weights
    work_s, own_s = float(problem.work_s[kind, group]), float(problem.own_s[kind, group])
    deadline_s, spread_s = float(problem.deadline_s[group]), float(problem.spread_s[group])
    requests = float(problem.count[group] * problem.weight[group])
    cost = weights.completion * requests * (start_s + own_s + 0.5 * work_s)
    if not math.isfinite(deadline_s):
        return cost
    for share in SHARES:
        gap_s = start_s + own_s + share * work_s - deadline_s - share * spread_s
        spread = max(math.sqrt(variance + problem.own_variance[kind, group] + share * problem.work_variance[kind, group]), 1e-3)
        z = gap_s / spread
        late = NORMAL.cdf(z)
        cost += requests / len(SHARES) * (weights.late * late + weights.tardiness * (gap_s * late + spread * NORMAL.pdf(z)))
    return cost


def slow_completions(problem: Problem, queues: list[list[int]]) -> float:
    """Equation 13 as printed: the sum of the groups' completion times, by the means, with swaps at their full time except the first one of
    a queue."""
    total = 0.0
    for queue, groups in enumerate(queues):
        kind, time_s, busy_s, before = int(problem.kind[queue]), 0.0, float(problem.drain_lead_s[queue]), -1
        for group in groups:
            model = int(problem.model[group])
            cold_s, warm_s = float(problem.cold_s[kind, model]), float(problem.warm_s[kind, model])
            swap_s = warm_s if problem.warm[queue, model] else max(cold_s, warm_s)
            if before < 0 and model == int(problem.active[queue]):
                time_s = float(problem.lead_s[queue])
            elif before < 0:
                behind_s, evicted_s = busy_s + max(warm_s, swap_s - busy_s), max(warm_s, swap_s)
                evicts = _evicts(problem, queue, group, behind_s, evicted_s)
                time_s = evicted_s if evicts else behind_s
                busy_s = 0.0 if evicts else busy_s
            elif model != problem.model[before]:
                time_s = max(time_s + float(problem.drain_s[kind, before]), busy_s) + swap_s
            time_s += float(problem.work_s[kind, group])
            total += time_s + float(problem.own_s[kind, group])
            before = group
    return total


def cheapest(problem: Problem) -> float:
    """Over all valid orders of all groups that can be served: for a handful of groups."""
    return _least(problem, lambda queues: slow_cost(problem, Orders.of(queues)))


def cheapest_together(problems: Sequence[Problem]) -> float:
    """The sum of what the same orders cost in several problems of the same groups."""
    return _least(problems[0], lambda queues: sum(slow_cost(problem, Orders.of(queues)) for problem in problems))


def least_completions(problem: Problem) -> float:
    """Over the same orders."""
    return _least(problem, lambda queues: slow_completions(problem, queues))


def _least(problem: Problem, cost: Callable[[list[list[int]]], float]) -> float:
    able = [group for group in range(problem.groups) if any(_serves(problem, queue, group) for queue in range(problem.queues))]
    best = math.inf
    for turn in permutations(able):
        for cuts in _cuts(len(able), problem.queues):
            queues = [list(turn[begin:end]) for begin, end in zip((0, *cuts), (*cuts, len(turn)), strict=True)]
            if valid(problem, queues):
                best = min(best, cost(queues))
    return best


def valid(problem: Problem, queues: list[list[int]]) -> bool:
    """Bands never fall along a queue, and every group can be served where it is."""
    return all(
        all(_serves(problem, queue, group) for group in groups) and bool((np.diff(problem.band[groups]) >= 0).all())
        for queue, groups in enumerate(queues)
        if groups
    )


def _serves(problem: Problem, queue: int, group: int) -> bool:
    kind, model = problem.kind[queue], problem.model[group]
    return bool(np.isfinite(problem.work_s[kind, group]) and np.isfinite(max(problem.cold_s[kind, model], problem.warm_s[kind, model])))


def _cuts(size: int, queues: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for _ in range(queues - 1):
        found = [(*cuts, cut) for cuts in found for cut in range(cuts[-1] if cuts else 0, size + 1)]
    return found
