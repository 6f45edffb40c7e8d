"""The runs behind the figures: one for each name and seed, several at a time, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.estimator.multi import predict_multi
from benchmarks.estimator.oracle import Oracle
from benchmarks.estimator.scores import Judged, coverage, r2
from benchmarks.estimator.single import Shift, predict_run
from benchmarks.estimator.workloads import load_trace

MULTI = "multi_"
"""Begins the name of a run of three models on two GPUs, before that of its requests."""
SHIFT_AT_SHARE = 0.5
SHIFTS = {
    "lengths_double": Shift(at_share=SHIFT_AT_SHARE, output_factor=2.0),
    "throughput_halves": Shift(at_share=SHIFT_AT_SHARE, slowness=2.0),
}
SHIFT_TRACE = "azure"
AFTER_SHIFT_S = (600.0, 1200.0)
"""Arrivals so long after a shift are judged."""
LEARNED_SHARE = 0.4
"""Share of the time before which nothing is judged."""
COLD_SHARE = 0.1
"""Share of the time that is judged by itself."""
R2_WANTED = 0.95
"""R2 of the wait: a run that has less is held against the oracle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`traces`: folder of the public traces. `rows_max`: only so many requests of each, for a quick look. `predicted_max`: requests of
    a run that are predicted."""

    traces: Path
    seeds: tuple[int, ...]
    rows_max: int | None
    predicted_max: int
    processes: int


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One run: what is judged of it, and its first COLD_SHARE. `oracle`: the same requests as an estimator predicts them that knows each
    class's current mean; None where R2_WANTED is reached without."""

    judged: Judged
    cold: Judged
    oracle: Judged | None = None


def measure_runs(names: Sequence[str], plan: Plan, say: Callable[[str], None]) -> dict[str, list[Run]]:
    """The judged part of each run, in the order of the seeds."""
    found: dict[tuple[str, int], Run] = {}
    with ProcessPoolExecutor(max_workers=plan.processes) as pool:
        waiting = {pool.submit(measure_run, name, seed, plan): (name, seed) for seed in plan.seeds for name in names}
        for done in as_completed(waiting):
            name, seed = waiting[done]
            run = found[name, seed] = done.result()
            judged = run.judged
            right, within = r2(judged.wait_s, judged.actual_wait_s), coverage(judged.wait_within(0.9))
            say(f"{name} with seed {seed}: {len(judged):,} requests judged, R2 of the wait {right:.4f}, {within:.1f}% within p90")
    return {name: [found[name, seed] for seed in plan.seeds] for name in names}


def measure_run(name: str, seed: int, plan: Plan) -> Run:
    """One run with one seed. A run with a shift is judged from 10 to 20 minutes after it."""
    shift = SHIFTS.get(name)
    requests = load_trace(plan.traces, SHIFT_TRACE if shift is not None else name.removeprefix(MULTI), seed, plan.rows_max)
    if name.startswith(MULTI):
        judged, duration_s = predict_multi(requests, seed, plan.predicted_max)
    else:
        judged, duration_s = predict_run(requests, seed, shift, plan.predicted_max)
    at_s = judged.arrival_s
    late = at_s >= LEARNED_SHARE * duration_s
    if shift is not None:
        after_s = at_s - shift.at_share * duration_s
        late = (after_s >= AFTER_SHIFT_S[0]) & (after_s < AFTER_SHIFT_S[1])
    run = Run(judged.where(late), judged.where(at_s < COLD_SHARE * duration_s))
    if name.startswith(MULTI) or shift is not None or r2(run.judged.wait_s, run.judged.actual_wait_s) >= R2_WANTED:
        return run
    knowing, _ = predict_run(requests, seed, None, plan.predicted_max, Oracle)
    return replace(run, oracle=knowing.where(late))


def seeds_of(text: str) -> tuple[int, ...]:
    """ "1-5" or "1,3,7". Raises ValueError for anything else."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds are like 1-5 or 1,3,7, got {text!r}")
    return tuple(seeds)


def judged_by_name(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[Judged]]:
    """The judged part of each run."""
    return {name: [run.judged for run in found] for name, found in runs.items()}
