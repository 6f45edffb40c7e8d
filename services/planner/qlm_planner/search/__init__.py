"""The search for better orders: a problem as arrays in, orders out. Knows nothing of boards; the same on every machine for a seed.

problem                       groups and queues to plan, the orders that answer it, their cost
solver                        evaluate, group_lateness, construct, improve, solve
packing, compile_cache        arrays as compiled code takes them; the compiler and its cache
group_cost, order_state       the cost of a group at its place; orders that are changed, with their cost at every place
construction                  orders without a search: earliest deadline first; the best place of a group
annealing, moves              simulated annealing, and the changes that it tries
random_numbers                the same numbers on every machine for a seed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qlm_planner.search.problem import Costs, Orders, Problem, ProblemError, Solution, Weights

if TYPE_CHECKING:
    from qlm_planner.search.solver import construct, evaluate, group_lateness, improve, solve, warm_up

__all__ = [
    "Costs",
    "Orders",
    "Problem",
    "ProblemError",
    "Solution",
    "Weights",
    "construct",
    "evaluate",
    "group_lateness",
    "improve",
    "solve",
    "warm_up",
]


def __getattr__(name: str) -> object:
    """What solves is loaded when it is asked for: a planner builds problems and lets its worker solve them, and the compiler takes half a
    second to load."""
    if name in __all__:
        from qlm_planner.search import solver

        return getattr(solver, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
