"""The search for better orders: arrays in, orders out; no board. A seed gives the same orders on every machine.

problem                       groups and queues to plan, their orders, the cost of orders
solver                        evaluate, group_lateness, construct, improve, solve
packing, compile_cache        arrays for compiled code; the compiler and its cache
group_cost, order_state       the cost of a group at its position; orders with their cost at every position
construction                  orders without a search: earliest deadline first; cheapest insertion
annealing, moves              simulated annealing, and its moves
random_numbers                pseudo-random numbers, the same on every machine
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
    """Loads the solver at its first use: a planner only builds problems, and the compiler takes half a second to load."""
    if name in __all__:
        from qlm_planner.search import solver

        return getattr(solver, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
