"""The exact solver: the paper's stochastic program (QLM section 7, equations 6-13; corrected) as a mixed-integer program in Pyomo, for
small queues, as reference and option. Needs the extra `planner`.

    program       the program: variables, constraints, objective
    scenarios     what stands for the distributions: means, quantiles (the chance constraint, soft) or samples
    backends      HiGHS and GLPK
    solver        a problem in, proven orders out, or an error that a caller falls back on
"""

from qlm_planner.exact.scenarios import Scenario, at_means, at_quantile, sampled
from qlm_planner.exact.solver import (
    ExactError,
    ExactlySolved,
    NoOrders,
    Settings,
    Solver,
    SolverFailed,
    SolverMissing,
    Status,
    TooLarge,
    solve_exactly,
)

__all__ = [
    "ExactError",
    "ExactlySolved",
    "NoOrders",
    "Scenario",
    "Settings",
    "Solver",
    "SolverFailed",
    "SolverMissing",
    "Status",
    "TooLarge",
    "at_means",
    "at_quantile",
    "sampled",
    "solve_exactly",
]
