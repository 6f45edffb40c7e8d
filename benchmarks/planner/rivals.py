"""Late requests against other rules: EDF with the earliest finish, and the paper's objective as printed (equation 13)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.parts import Measured
from benchmarks.planner.generator import Shape, drawn
from benchmarks.planner.parts import Plan, replanned
from benchmarks.planner.printed import printed_optimum
from benchmarks.planner.snapshots import snapshots
from qlm_planner.search import Problem, Weights
from qlm_planner.search.solver import construct, evaluate
from qlm_planner.shell.warm_up import warm_up

SEEDS = 20
INSTANCES, MODELS = 8, 12
GROUPS = 200
TIGHTNESS = (0.5, 1.2)
PROVEN = ((8, 2), (12, 2), (16, 2), (16, 4))
PROVEN_MODELS = 4
"""Groups and queues for which equation 13 is solved to the optimum."""
LARGE = ((40, 4), (100, 8))
"""Groups and queues for which it is minimised by the scalable solver."""
PRINTED = Weights(late=0.0, tardiness=0.0, work=0.0, completion=1.0)
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
    return replanned(problem, case.seed).cost.late, construct(problem).cost.late


def measure_edf(plan: Plan) -> Measured:
    seeds = [plan.seed + number for number in range(plan.some(SEEDS))]
    drawn_ones = plan.each(_against_edf, [Case(seed=seed) for seed in seeds], "edf")
    details: dict[str, object] = _late_details(drawn_ones, "edf")
    if plan.traces is not None:
        queues = plan.each(_against_edf, [Case(seed=seed, traces=plan.traces) for seed in seeds], "edf on traces")
        details["traces"] = _late_details(queues, "edf")
    return Measured(values={"late_vs_edf": _ratio(drawn_ones)}, details=details)


def _against_eq13(case: tuple[int, int, int]) -> tuple[float, float]:
    """(seed, groups, queues)."""
    warm_up()
    seed, groups, queues = case
    tightness = float(np.random.default_rng((seed, 37)).uniform(*TIGHTNESS))
    problem = drawn(seed, Shape(groups=groups, queues=queues, models=PROVEN_MODELS, tightness=tightness))
    return replanned(problem, seed).cost.late, printed_optimum(problem).solved.cost.late


def _against_eq13_at(case: tuple[int, int, int]) -> tuple[float, float]:
    """(seed, groups, queues). Both are given the same moves."""
    warm_up()
    seed, groups, queues = case
    tightness = float(np.random.default_rng((seed, 41)).uniform(*TIGHTNESS))
    problem = drawn(seed, Shape(groups=groups, queues=queues, models=MODELS, tightness=tightness))
    printed = replanned(replace(problem, count=np.ones(groups), weights=PRINTED), seed)
    return replanned(problem, seed).cost.late, evaluate(problem, printed.orders).late


def measure_eq13(plan: Plan) -> Measured:
    """The key: all problems together for which equation 13 is solved to the optimum. The details have each size by itself, and sizes for
    which it is searched for only."""
    seeds = [plan.seed + number for number in range(plan.some(SEEDS))]
    proven: list[tuple[float, float]] = []
    details: dict[str, object] = {}
    for sizes, against, how in ((PROVEN, _against_eq13, "proven"), (LARGE, _against_eq13_at, "searched")):
        for groups, queues in sizes:
            pairs = plan.each(against, [(seed, groups, queues) for seed in seeds], f"eq 13, {groups} groups")
            details[f"{groups} groups, {queues} queues, {how}"] = {"late_vs_eq13": _ratio(pairs), **_late_details(pairs, "eq13")}
            if sizes is PROVEN:
                proven += pairs
    return Measured(values={"late_vs_eq13": _ratio(proven)}, details=details)


def _ratio(found: list[tuple[float, float]]) -> float | None:
    """Late requests of all cases over those of the other rule."""
    other = sum(each for _, each in found)
    return round(sum(each for each, _ in found) / other, 4) if other > 0.0 else None


def _late_details(found: list[tuple[float, float]], name: str) -> dict[str, object]:
    return {"cases": len(found), "late": [round(each, 1) for each, _ in found], f"late_{name}": [round(each, 1) for _, each in found]}
