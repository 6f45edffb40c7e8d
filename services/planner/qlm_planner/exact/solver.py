"""Solves a problem to proven orders, or raises an `ExactError`, on which the caller falls back.

QlmError
`- ExactError
   |- SolverMissing    Pyomo or the solver is not installed
   |- SolverFailed     it ended without an answer
   |- NoOrders         it has no orders within the time limit, or there are none
   `- TooLarge         too many groups or variables
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from qlm_core.vocabulary.errors import ConfigError, QlmError
from qlm_planner.search.packing import packed
from qlm_planner.search.problem import Costs, Floats, Orders, Problem
from qlm_planner.search.solver import evaluate

SEATS_MAX = 20_000
"""Most binaries of the program: building a larger one takes longer than a reasonable time limit."""


class ExactError(QlmError):
    """There is no exact answer."""


class SolverMissing(ExactError):
    """Pyomo or the solver is not installed."""


class SolverFailed(ExactError):
    """The solver ended without an answer."""


class NoOrders(ExactError):
    """The solver has no orders within the time limit, or there are none."""


class TooLarge(ExactError):
    """Too many groups or variables."""


class Status(StrEnum):
    """OPTIMAL: proven within the gap. FEASIBLE: the best within the time limit."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"


class Solver(StrEnum):
    HIGHS = "highs"
    GLPK = "glpk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`gap`: relative gap of the objective that counts as proven. Raises ConfigError."""

    solver: Solver = Solver.HIGHS
    time_limit_s: float = 10.0
    gap: float = 1e-6

    def __post_init__(self) -> None:
        if self.solver not in tuple(Solver):
            raise ConfigError(f"solver: must be one of {', '.join(Solver)}, got {self.solver}")
        if not (math.isfinite(self.time_limit_s) and self.time_limit_s > 0.0):
            raise ConfigError(f"time_limit_s: must be finite and > 0, got {self.time_limit_s}")
        if not 0.0 <= self.gap < 1.0:
            raise ConfigError(f"gap: must be 0 to below 1, got {self.gap}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactSolution:
    """`cost`: of the orders by the closed form, for comparisons. `objective`, `bound`: of the program; `gap` between them, infinite without
    a bound. `wall_s`: with building the program."""

    orders: Orders
    cost: Costs
    solver: Solver
    status: Status
    objective: float
    bound: float
    gap: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario:
    """Times for a part of the distributions: `work_s`, `own_s` [K, G]. `late_share`: its weight in the objective's lateness; `share`: in
    the other terms."""

    work_s: Floats
    own_s: Floats
    late_share: float
    share: float


def at_means(problem: Problem) -> Sequence[Scenario]:
    """One scenario with all means: exact without variance."""
    return (Scenario(work_s=problem.work_s, own_s=problem.own_s, late_share=1.0, share=1.0),)


def solve_exactly(problem: Problem, settings: Settings | None = None, scenarios: Sequence[Scenario] | None = None) -> ExactSolution:
    """The best orders of the program over the scenarios (by default the means). Raises ExactError."""
    settings = Settings() if settings is None else settings
    began_s = time.perf_counter()
    arrays = packed(problem)
    able = int(arrays.serves[arrays.kind].any(axis=0).sum())
    if able == 0:
        orders = Orders.of([[] for _ in range(problem.queues)])
        return _solution(problem, orders, settings, Status.OPTIMAL, 0.0, 0.0, began_s)
    if able * problem.queues * able > SEATS_MAX:
        raise TooLarge(f"{able} groups on {problem.queues} queues: more than {SEATS_MAX:,} seats")
    try:
        from qlm_planner.exact.backends import BACKENDS
        from qlm_planner.exact.program import program_of  # local: Pyomo takes a second, and is an extra
    except ImportError as error:
        raise SolverMissing(f"Pyomo is not installed ({error}): pip install 'qlm-serving[planner]'") from error
    program = program_of(problem, arrays, scenarios or at_means(problem), able)
    left_s = settings.time_limit_s - (time.perf_counter() - began_s)
    answer = BACKENDS[settings.solver](program.model, max(left_s, 0.1), settings.gap)
    return _solution(problem, program.orders(), settings, answer.status, answer.objective, answer.bound, began_s)


def _solution(
    problem: Problem, orders: Orders, settings: Settings, status: Status, objective: float, bound: float, began_s: float
) -> ExactSolution:
    gap = max(0.0, objective - bound) / max(abs(objective), 1e-9) if math.isfinite(bound) else math.inf
    return ExactSolution(
        orders=orders,
        cost=evaluate(problem, orders),
        solver=settings.solver,
        status=status,
        objective=objective,
        bound=bound,
        gap=gap,
        wall_s=time.perf_counter() - began_s,
    )
