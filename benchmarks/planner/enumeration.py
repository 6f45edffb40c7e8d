"""Every order, for the expected cost itself: the proven optimum that no linear program can prove, for up to ten groups.

The cheapest order of each set of groups on each queue comes from walking all orders of all sets once; the cheapest split of the groups over
the queues from a dynamic program over sets. Queues cost nothing to each other, so that is all orders of the plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qlm_planner.search.compile_cache import compiled, lean
from qlm_planner.search.order_state import BEGIN, KEPT, LENGTH, QUEUE, OrderState, Sketch, commit, empty_sketch, plan_of, queue_cost, walk
from qlm_planner.search.packing import Packed, packed
from qlm_planner.search.problem import Floats, Integers, Orders, Problem, Solution
from qlm_planner.search.solver import evaluate, solve

GROUPS_MAX = 10
EXACT = 1e-6
"""To within which a walk costs what the orders do: its normal distribution is a table."""
MOVES = 10_000
"""Moves of the annealing that gives a first bound."""


def enumerated(problem: Problem) -> Solution:
    """The orders of the least expected cost. Raises ValueError."""
    if problem.groups > GROUPS_MAX:
        raise ValueError(f"all orders of {problem.groups} groups: at most {GROUPS_MAX} can be tried")
    arrays = packed(problem)
    # No part of an order may cost more than a whole plan that is known.
    known = solve(problem, moves=MOVES, seed=1).cost.total * (1.0 + EXACT)
    able = np.flatnonzero(arrays.serves[arrays.kind].any(axis=0)).astype(np.int32)
    sets = 1 << len(able)
    costs = np.full((problem.queues, sets), np.inf)
    orders = np.zeros((problem.queues, sets, max(1, len(able))), dtype=np.int32)
    for queue in range(problem.queues):
        _best_orders(arrays, queue, able, known, costs[queue], orders[queue])
    chosen = best_split(costs)
    found = Orders.of([orders[queue, chosen[queue], : int(chosen[queue]).bit_count()].tolist() for queue in range(problem.queues)])
    return Solution(orders=found, cost=evaluate(problem, found), rule="all orders")


@compiled
def _best_orders(arrays: Packed, queue: int, able: Integers, most: float, costs: Floats, orders: NDArray[np.int32]) -> None:
    """The cheapest order of each set of groups on the queue, infinite where there is none that costs less than `most`."""
    size = len(able)
    plan = plan_of(arrays, np.zeros(len(arrays.kind) + 1, dtype=np.int64), np.empty(0, dtype=np.int32), size + 1)
    sketch = empty_sketch(size + 1)
    costs[0] = queue_cost(plan, queue)
    # The next choice at each depth: the walk goes on from there.
    choice = np.zeros(size + 1, dtype=np.int64)
    depth, members = 0, 0
    while depth >= 0:
        if choice[depth] == size:
            choice[depth] = 0
            depth -= 1
            if depth >= 0:
                members ^= 1 << (choice[depth] - 1)
                plan.size[queue] = depth
            continue
        number = choice[depth]
        choice[depth] += 1
        group = able[number]
        if members >> number & 1 or not arrays.serves[arrays.kind[queue], group]:
            continue
        if depth > 0 and arrays.band[plan.order[queue, depth - 1]] > arrays.band[group]:
            continue
        _append(arrays, plan, sketch, queue, depth, group)
        if plan.cost[queue, depth + 1] > most:
            plan.size[queue] = depth
            continue
        members |= 1 << number
        depth += 1
        if plan.cost[queue, depth] < costs[members]:
            costs[members] = plan.cost[queue, depth]
            orders[members, :depth] = plan.order[queue, :depth]


@lean
def _append(arrays: Packed, plan: OrderState, sketch: Sketch, queue: int, depth: int, group: int) -> None:
    sketch.groups[0] = group
    sketch.at[QUEUE], sketch.at[BEGIN], sketch.at[LENGTH], sketch.at[KEPT] = queue, depth, 1, 0
    walk(arrays, plan, sketch, np.inf)
    commit(plan, sketch)


@compiled
def best_split(costs: Floats) -> NDArray[np.int64]:
    """The set of each queue, all groups among them, of the least sum."""
    queues, sets = costs.shape
    best = np.full((queues + 1, sets), np.inf)
    taken = np.zeros((queues + 1, sets), dtype=np.int64)
    best[0, 0] = 0.0
    for queue in range(queues):
        for members in range(sets):
            own = members
            while True:
                cost = costs[queue, own] + best[queue, members ^ own]
                if cost < best[queue + 1, members]:
                    best[queue + 1, members] = cost
                    taken[queue + 1, members] = own
                if own == 0:
                    break
                own = (own - 1) & members
    chosen = np.zeros(queues, dtype=np.int64)
    left = sets - 1
    for queue in range(queues - 1, -1, -1):
        chosen[queue] = taken[queue + 1, left]
        left ^= chosen[queue]
    return chosen
