"""The runs behind the figures: one for each name and seed, several at a time, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from qlm_estimator.predictions import Z_P90
from qlm_load.bench_estimator.multi import predict_multi
from qlm_load.bench_estimator.scores import Judged, coverage, r2
from qlm_load.bench_estimator.single import Shift, predict_run
from qlm_load.bench_estimator.workloads import load_trace

SHIFT_AT_SHARE = 0.5
SHIFTS = {
    "lengths_double": Shift(at_share=SHIFT_AT_SHARE, output_factor=2.0),
    "throughput_halves": Shift(at_share=SHIFT_AT_SHARE, slowness=2.0),
}
SHIFT_TRACE = MULTI_TRACE = "azure"
AFTER_SHIFT_S = (600.0, 1200.0)
"""Arrivals so long after a shift are judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`traces`: folder of the public traces. `rows_max`: only so many requests of each, for a quick look. `predicted_max`: requests of
    a run that are predicted."""

    traces: Path
    seeds: tuple[int, ...]
    rows_max: int | None
    predicted_max: int
    processes: int


def measure_runs(names: Sequence[str], plan: Plan, say: Callable[[str], None]) -> dict[str, list[Judged]]:
    """What was judged in each run, in the order of the seeds."""
    found: dict[tuple[str, int], Judged] = {}
    with ProcessPoolExecutor(max_workers=plan.processes) as pool:
        waiting = {pool.submit(measure_run, name, seed, plan): (name, seed) for seed in plan.seeds for name in names}
        for done in as_completed(waiting):
            name, seed = waiting[done]
            judged = found[name, seed] = done.result()
            right, within = r2(judged.wait_s, judged.actual_wait_s), coverage(judged.wait_within(Z_P90))
            say(f"{name} with seed {seed}: {len(judged):,} requests judged, R2 of the wait {right:.4f}, {within:.1f}% within p90")
    return {name: [found[name, seed] for seed in plan.seeds] for name in names}


def measure_run(name: str, seed: int, plan: Plan) -> Judged:
    """One run with one seed. A run with a shift is judged from 10 to 20 minutes after it."""
    shift = SHIFTS.get(name)
    trace = SHIFT_TRACE if shift is not None else MULTI_TRACE if name == "multi" else name
    requests = load_trace(plan.traces, trace, seed, plan.rows_max)
    if name == "multi":
        return predict_multi(requests, seed, plan.predicted_max)
    judged, duration_s = predict_run(requests, seed, shift, plan.predicted_max)
    if shift is None:
        return judged
    after_s = judged.arrival_s - shift.at_share * duration_s
    return judged.where((after_s >= AFTER_SHIFT_S[0]) & (after_s < AFTER_SHIFT_S[1]))


def seeds_of(text: str) -> tuple[int, ...]:
    """ "1-5" or "1,3,7". Raises ValueError for anything else."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds are like 1-5 or 1,3,7, got {text!r}")
    return tuple(seeds)


def by_name(runs: Mapping[str, Sequence[Judged]], names: Sequence[str]) -> dict[str, Sequence[Judged]]:
    """Those of some names that there are."""
    return {name: runs[name] for name in names if name in runs}
