"""The gap of a replan to a long search: 10 s of many seeds and temperatures. Expected late requests first, then tardiness as a share
of all the time until completion."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.parts import Measured
from benchmarks.planner.generator import Shape, drawn
from benchmarks.planner.parts import Plan, replanned
from benchmarks.planner.snapshots import snapshots
from qlm_planner.search import Costs, Problem
from qlm_planner.search.solver import construct, improve, solve
from qlm_planner.shell.warm_up import warm_up

CASES = 40
TRACE_CASES = 10
REFERENCE_MOVES = 1_500_000
REFERENCE_HOTS = (0.03, 0.1, 0.3, 0.6)
"""Temperatures of the reference, each from another start."""
REFERENCE_SEEDS, REFERENCE_SEED_MOVES = 20, 200_000
"""Searches of the reference from the cheapest construction."""
ONE_LATE = 0.5
"""Expected late requests beyond which it is one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    seed: int
    scale: float
    traces: Path | None = None

    def problem(self) -> Problem:
        if self.traces is not None:
            return snapshots(self.traces, self.seed)
        chance = np.random.default_rng((self.seed, 23))
        return drawn(
            self.seed,
            Shape(
                groups=int(chance.integers(20, 101)),
                queues=int(chance.integers(1, 13)),
                models=int(chance.integers(2, 41)),
                tightness=float(chance.uniform(0.3, 2.0)),
                kinds=int(chance.integers(1, 4)),
                partial=float(chance.choice([0.0, 0.2])),
                bands=int(chance.choice([1, 1, 1, 3])),
                noise=float(chance.choice([0.05, 0.15, 0.3])),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """`more_late`: than the cheapest plan found; `beyond_fewest`: than the plan found with the fewest late, whatever it costs."""

    groups: int
    more_late: float
    beyond_fewest: float
    tardiness_pct: float
    cost_pct: float
    took_ms: float


def _case(case: Case) -> Gap:
    warm_up()
    problem = case.problem()
    began_s = time.process_time()
    found = replanned(problem, case.seed).cost
    took_ms = 1e3 * (time.process_time() - began_s)
    references = _references(problem, case)
    best = min([found, *references], key=lambda cost: cost.total)
    return Gap(
        groups=problem.groups,
        more_late=found.late - best.late,
        beyond_fewest=found.late - min(cost.late for cost in (found, *references)),
        tardiness_pct=100.0 * (found.tardiness_s - best.tardiness_s) / max(best.completion_s, 1e-9),
        cost_pct=100.0 * (found.total / max(best.total, 1e-9) - 1.0),
        took_ms=took_ms,
    )


def _references(problem: Problem, case: Case) -> list[Costs]:
    """All results of a long search."""
    moves = max(1_000, round(REFERENCE_MOVES * case.scale))
    start = construct(problem).orders
    costs = [improve(problem, start, moves=moves, seed=1_000 + number, hot=hot).cost for number, hot in enumerate(REFERENCE_HOTS)]
    seeds = max(1, round(REFERENCE_SEEDS * case.scale))
    costs += [solve(problem, moves=REFERENCE_SEED_MOVES, seed=2_000 + case.seed + number).cost for number in range(seeds)]
    return costs


def measure(plan: Plan) -> Measured:
    cases = [Case(seed=plan.seed + number, scale=plan.scale) for number in range(plan.some(CASES))]
    if plan.traces is not None:
        cases += [Case(seed=plan.seed + number, scale=plan.scale, traces=plan.traces) for number in range(plan.some(TRACE_CASES))]
    found = plan.each(_case, cases, "gaps")
    late = np.array([gap.more_late for gap in found])
    fewest = np.array([gap.beyond_fewest for gap in found])
    tardiness = np.array([gap.tardiness_pct for gap in found])
    cost = np.array([gap.cost_pct for gap in found])
    took = np.array([gap.took_ms for gap in found])
    return Measured(
        values={
            "gap_late": {"share": round(float((late <= ONE_LATE).mean()), 4), "mean": round(float(late.mean()), 3)},
            "gap_pct": {"mean": round(float(tardiness.mean()), 4), "p95": round(float(np.quantile(tardiness, 0.95)), 4)},
        },
        details={
            "cases": len(found),
            "groups": {"min": min(gap.groups for gap in found), "max": max(gap.groups for gap in found)},
            "beyond_fewest_late": {"share": round(float((fewest <= ONE_LATE).mean()), 4), "mean": round(float(fewest.mean()), 3)},
            "late_max": round(float(late.max()), 2),
            "cost_pct": {
                "mean": round(float(cost.mean()), 3),
                "p95": round(float(np.quantile(cost, 0.95)), 3),
                "max": round(float(cost.max()), 3),
            },
            "solver_ms": {"median": round(float(np.median(took)), 1), "max": round(float(took.max()), 1)},
        },
    )
