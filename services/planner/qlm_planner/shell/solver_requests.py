"""Answers a job of the solver, in its process, in the simulator or in a test; and the messages for advice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from qlm_planner.machine.effects import Solve
from qlm_planner.machine.events import Solved, SolveFailed
from qlm_planner.overload.advice import Advice
from qlm_planner.overload.advice_question import Question
from qlm_planner.search import Solution

REASON_CHARACTERS_MAX = 500
EXACT_GROUPS_MAX = 10
"""Most groups for which an order can be proven the best in time (ADR 14)."""
EXACT_TIME_LIMIT_S = 5.0


class Choice(StrEnum):
    """Solver of plans. The exact ones solve small queues within a time limit; the heuristic solves all others."""

    HEURISTIC = "heuristic"
    EXACT_HIGHS = "exact-highs"
    EXACT_GLPK = "exact-glpk"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRequest:
    """A question; a newer one replaces it before its answer."""

    number: int
    question: Question


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceAnswer:
    """`advice`: None for a failure with a `reason`."""

    number: int
    advice: Advice | None
    reason: str = ""


def answer(job: Solve, choice: Choice = Choice.HEURISTIC) -> Solved | SolveFailed:
    """The answer to a job, a function of it alone unless an exact solver reaches its time limit. Errors of the solver become SolveFailed:
    the present plan stays."""
    try:
        found = _found(job, choice)
    except Exception as error:
        return SolveFailed(job=job.job, reason=f"{type(error).__name__}: {error}"[:REASON_CHARACTERS_MAX])
    return Solved(job=job.job, orders=found.orders, rule=found.rule)


def _found(job: Solve, choice: Choice) -> Solution:
    from qlm_planner.search.solver import improve, solve  # local: it loads the compiler

    if job.orders is not None:
        return improve(job.problem, job.orders, moves=job.moves, seed=job.seed)
    found = solve(job.problem, moves=job.moves, seed=job.seed)
    return found if choice is Choice.HEURISTIC or job.problem.groups > EXACT_GROUPS_MAX else _exact(job, choice, found)


def _exact(job: Solve, choice: Choice, heuristic: Solution) -> Solution:
    """The exact solver's orders if they are cheaper; else the heuristic's, with the reason in the rule."""
    from qlm_planner.exact.solver import ExactError, Settings, Solver, solve_exactly  # local: it loads the compiler

    own = Solver.HIGHS if choice is Choice.EXACT_HIGHS else Solver.GLPK
    try:
        found = solve_exactly(job.problem, Settings(solver=own, time_limit_s=EXACT_TIME_LIMIT_S))
    except ExactError as error:
        return Solution(orders=heuristic.orders, cost=heuristic.cost, rule=f"{heuristic.rule}; {choice}: {error}")
    rule = f"{choice}: {found.status}"
    if found.cost.total < heuristic.cost.total:
        return Solution(orders=found.orders, cost=found.cost, rule=rule)
    return Solution(orders=heuristic.orders, cost=heuristic.cost, rule=f"{heuristic.rule}; {rule}")
