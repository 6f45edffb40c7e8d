"""The scalable solver: a problem as arrays in, orders out. Knows nothing of boards; pure, and the same on every machine for a seed.

problem       what there is to plan, and what comes out
solving       evaluate, construct, improve, solve, insert; edf to compare with
packing, compiled, chance, normal    arrays as compiled code takes them; the compiler and its cache; random numbers; the normal
cost, evaluation                     what a group costs where it stands; what orders cost
draft, construction                  list scheduling by several rules
plan, moves, annealing, insertion    orders being changed; changes; annealing; the best place of a group
"""

from qlm_planner.solver.problem import Costs, Evaluation, Orders, Problem, ProblemError, Solved, Weights
from qlm_planner.solver.solving import construct, edf, evaluate, improve, insert, solve, warm_up

__all__ = [
    "Costs",
    "Evaluation",
    "Orders",
    "Problem",
    "ProblemError",
    "Solved",
    "Weights",
    "construct",
    "edf",
    "evaluate",
    "improve",
    "insert",
    "solve",
    "warm_up",
]
