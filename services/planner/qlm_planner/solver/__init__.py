"""The scalable solver: a problem as arrays in, orders out. Knows nothing of boards; pure, and the same on every machine for a seed.

problem       what there is to plan, and what comes out
solving       evaluate, group_lateness, construct, improve, solve
packing, compiled, chance, normal    arrays as compiled code takes them; the compiler and its cache; random numbers; the normal
cost, evaluation                     what a group costs where it stands; what orders cost
construction  a whole plan at once: earliest deadline first
plan, moves, annealing, insertion    orders being changed; changes; annealing; the best place of a group
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qlm_planner.solver.problem import Costs, Orders, Problem, ProblemError, Solved, Weights

if TYPE_CHECKING:
    from qlm_planner.solver.solving import construct, evaluate, group_lateness, improve, solve, warm_up

__all__ = [
    "Costs",
    "Orders",
    "Problem",
    "ProblemError",
    "Solved",
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
        from qlm_planner.solver import solving

        return getattr(solving, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
