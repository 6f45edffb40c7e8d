"""What stands for the distributions in a linear program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from qlm_core.errors import ConfigError
from qlm_planner.search.problem import Floats, Problem

SCENARIOS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario:
    """`work_s`, `own_s` [K, G]: as they come out in it. `late_share`: its weight in the lateness of the objective; `share`: in all else."""

    work_s: Floats
    own_s: Floats
    late_share: float
    share: float


def at_means(problem: Problem) -> Sequence[Scenario]:
    """All comes out as expected: exact where nothing is uncertain."""
    return (Scenario(work_s=problem.work_s, own_s=problem.own_s, late_share=1.0, share=1.0),)


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
    work_deviation, own_deviation = np.sqrt(finite(problem.work_variance)), np.sqrt(finite(problem.own_variance))
    found = []
    for _ in range(scenarios):
        # What makes a group longer makes it so on every kind.
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


def finite(values: Floats) -> Floats:
    """Zeros where a kind cannot serve a group, which it never gets."""
    return np.where(np.isfinite(values), values, 0.0) if not math.isfinite(float(values.sum())) else values
