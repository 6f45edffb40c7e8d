"""Scenarios for the exact program beside the means: quantiles, the chance constraint of QLM (equation 12) as a penalty, and samples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from qlm_core.vocabulary.errors import ConfigError
from qlm_planner.exact.solver import Scenario
from qlm_planner.search.problem import Problem

SCENARIOS_MAX = 100


def at_quantile(problem: Problem, level: float) -> Sequence[Scenario]:
    """Equation 12: late is who is not in time with probability `level`, as a penalty (under overload no order keeps it). Along a queue the
    quantiles are added, which is on the safe side: deviations grow slower. All else in the mean."""
    if not 0.5 <= level < 1.0:
        raise ConfigError(f"level: must be 0.5 to below 1, got {level}")
    z = NormalDist().inv_cdf(level)
    return (
        Scenario(work_s=problem.work_s, own_s=problem.own_s, late_share=0.0, share=1.0),
        Scenario(
            work_s=problem.work_s + z * np.sqrt(problem.work_variance),
            own_s=problem.own_s + z * np.sqrt(problem.own_variance),
            late_share=1.0,
            share=0.0,
        ),
    )


def sampled(problem: Problem, scenarios: int, seed: int) -> Sequence[Scenario]:
    """Sample-average approximation: so many draws of all times, equally likely, none below 0."""
    if not 1 <= scenarios <= SCENARIOS_MAX:
        raise ConfigError(f"scenarios: must be 1 to {SCENARIOS_MAX}, got {scenarios}")
    chance = np.random.default_rng(seed)
    # Where a kind cannot serve a group its time is infinite, whatever is drawn.
    variances = (problem.work_variance, problem.own_variance)
    work_deviation, own_deviation = (np.sqrt(np.where(np.isfinite(each), each, 0.0)) for each in variances)
    found = []
    for _ in range(scenarios):
        # A group that is longer is so on every kind.
        work, own = chance.standard_normal((2, problem.groups))
        found.append(
            Scenario(
                work_s=np.maximum(0.0, problem.work_s + work * work_deviation),
                own_s=np.maximum(0.0, problem.own_s + own * own_deviation),
                late_share=1.0 / scenarios,
                share=1.0 / scenarios,
            )
        )
    return tuple(found)
