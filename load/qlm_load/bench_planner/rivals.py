"""Late requests against other rules: EDF with the earliest finish, and the paper's objective as printed (equation 13)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qlm_load.bench.parts import Measured
from qlm_load.bench_planner.generator import Shape, drawn
from qlm_load.bench_planner.parts import Plan
from qlm_load.bench_planner.snapshots import snapshots
from qlm_planner.exact import ExactError, Settings, solve_exactly
from qlm_planner.solver import Problem, Weights, edf, evaluate, solve, warm_up

SEEDS = 20
MOVES = 100_000
INSTANCES, MODELS = 8, 12
GROUPS = 200
TIGHTNESS = (0.5, 1.2)
SMALL_GROUPS, SMALL_QUEUES, SMALL_MODELS = 8, 2, 4
"""What equation 13 is solved for exactly."""
TIME_LIMIT_S = 20.0
LARGE = ((40, 4), (100, 8))
"""Groups and queues for which it is minimised by the scalable solver."""
PRINTED = Weights(late=0.0, tardiness=0.0, work=0.0, completion=1.0, head_gain=0.0, starvation=0.0)
"""Equation 13 as printed: the sum of the groups' completion times, since the SLOs in it are constants. Each group counts once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    seed: int
    traces: Path | None = None

    def problem(self) -> Problem:
        if self.traces is not None:
            return snapshots(self.traces, self.seed)
        tightness = float(np.random.default_rng((self.seed, 31)).uniform(*TIGHTNESS))
        return drawn(self.seed, Shape(groups=GROUPS, queues=INSTANCES, models=MODELS, tightness=tightness))


def _against_edf(case: Case) -> tuple[float, float]:
    warm_up()
    problem = case.problem()
    return solve(problem, moves=MOVES, seed=case.seed).cost.late, edf(problem).cost.late


def measure_edf(plan: Plan) -> Measured:
    seeds = [plan.seed + number for number in range(plan.some(SEEDS))]
    drawn_ones = plan.each(_against_edf, [Case(seed=seed) for seed in seeds], "edf")
    details: dict[str, object] = _told(drawn_ones, "edf")
    if plan.traces is not None:
        queues = plan.each(_against_edf, [Case(seed=seed, traces=plan.traces) for seed in seeds], "edf on traces")
        details["traces"] = _told(queues, "edf")
    return Measured(values={"late_vs_edf": _ratio(drawn_ones)}, details=details)


def _against_eq13(seed: int) -> tuple[float, float] | None:
    """None where equation 13 could not be solved."""
    warm_up()
    tightness = float(np.random.default_rng((seed, 37)).uniform(*TIGHTNESS))
    problem = drawn(seed, Shape(groups=SMALL_GROUPS, queues=SMALL_QUEUES, models=SMALL_MODELS, tightness=tightness))
    try:
        printed = solve_exactly(problem, Settings(printed=True, time_limit_s=TIME_LIMIT_S))
    except ExactError:
        return None
    return solve(problem, moves=MOVES, seed=seed).cost.late, printed.cost.late


def _against_eq13_at(case: tuple[int, int, int]) -> tuple[float, float]:
    """(seed, groups, queues). Both are given the same moves."""
    warm_up()
    seed, groups, queues = case
    tightness = float(np.random.default_rng((seed, 41)).uniform(*TIGHTNESS))
    problem = drawn(seed, Shape(groups=groups, queues=queues, models=MODELS, tightness=tightness))
    printed = solve(replace(problem, count=np.ones(groups), weights=PRINTED), moves=MOVES, seed=seed)
    return solve(problem, moves=MOVES, seed=seed).cost.late, evaluate(problem, printed.orders).cost.late


def measure_eq13(plan: Plan) -> Measured:
    seeds = [plan.seed + number for number in range(plan.some(SEEDS))]
    found = plan.each(_against_eq13, seeds, "eq 13")
    solved = [each for each in found if each is not None]
    details: dict[str, object] = {"unsolved": len(found) - len(solved), **_told(solved, "eq13")}
    for groups, queues in LARGE:
        pairs = plan.each(_against_eq13_at, [(seed, groups, queues) for seed in seeds], f"eq 13, {groups} groups")
        details[f"{groups} groups, {queues} queues"] = {"late_vs_eq13": _ratio(pairs), **_told(pairs, "eq13")}
    return Measured(values={"late_vs_eq13": _ratio(solved)}, details=details)


def _ratio(found: list[tuple[float, float]]) -> float | None:
    """Late requests of all cases over those of the other rule."""
    other = sum(each for _, each in found)
    return round(sum(each for each, _ in found) / other, 4) if other > 0.0 else None


def _told(found: list[tuple[float, float]], name: str) -> dict[str, object]:
    return {"cases": len(found), "late": [round(each, 1) for each, _ in found], f"late_{name}": [round(each, 1) for _, each in found]}
