"""Proven optima hit: problems of up to ten groups against every order of them, by the expected cost itself.

Pyomo proves the linear program, not the expected cost (its chances are not linear), so the proof is by enumeration
(`enumeration`); the tests hold both to each other where nothing is uncertain.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.parts import Measured
from benchmarks.planner.enumeration import enumerated
from benchmarks.planner.generator import Shape, drawn
from benchmarks.planner.parts import Plan, replanned
from qlm_planner.shell.warm_up import warm_up

CASES = 100
SAME = 1e-6
"""Relative: as good as the optimum."""


def shape_of(seed: int) -> Shape:
    """Sizes, tightness and hardware all over the range."""
    chance = np.random.default_rng((seed, 17))
    return Shape(
        groups=int(chance.integers(5, 11)),
        queues=int(chance.integers(1, 4)),
        models=int(chance.integers(1, 7)),
        tightness=float(chance.uniform(0.4, 2.5)),
        kinds=int(chance.integers(1, 3)),
        partial=float(chance.choice([0.0, 0.3])),
        bands=int(chance.choice([1, 1, 2])),
        noise=float(chance.choice([0.0, 0.1, 0.3])),
    )


def _case(seed: int) -> tuple[float, float]:
    """How far above the optimum, relative, and the milliseconds of the solver."""
    warm_up()
    problem = drawn(seed, shape_of(seed))
    began_s = time.process_time()
    solved = replanned(problem, seed)
    took_ms = 1e3 * (time.process_time() - began_s)
    best = enumerated(problem).cost.total
    return solved.cost.total / max(best, 1e-9) - 1.0, took_ms


def measure(plan: Plan) -> Measured:
    found = plan.each(_case, [plan.seed + number for number in range(plan.some(CASES))], "exactness")
    above = np.array([each for each, _ in found])
    took = np.array([each for _, each in found])
    return Measured(
        values={"exact_hit_rate": round(float((above <= SAME).mean()), 4)},
        details={
            "cases": len(found),
            "solver_ms": {"median": round(float(np.median(took)), 1), "max": round(float(took.max()), 1)},
            "worst_above_pct": round(100.0 * float(above.max()), 4),
        },
    )
