"""The command `planner`: its parts, and the options of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from benchmarks.parts import Measured, Parts, bench_options, late
from benchmarks.planner import figures
from benchmarks.planner.parts import Plan

PARTS: Mapping[str, Callable[[Plan], Measured]] = {
    figures.EXACTNESS: late("benchmarks.planner.exactness"),
    figures.GAPS: late("benchmarks.planner.gaps"),
    figures.EDF: late("benchmarks.planner.rivals", "measure_edf"),
    figures.EQ13: late("benchmarks.planner.rivals", "measure_eq13"),
    figures.LIVE: late("benchmarks.planner.live"),
    figures.ADVICE: late("benchmarks.planner.advice_error"),
    figures.BATCH: late("benchmarks.planner.batch_choice"),
}


@click.command()
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of public traces: also queues as they stand there.",
)
@bench_options(figures.FIGURES, "The first of the problems' seeds.")
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True, help="Cases at a time.")
def planner(traces: Path | None, as_json: bool, seed: int, only: tuple[str, ...], quick: bool, processes: int) -> None:
    """Measure the planner: proven optima hit, the gap to a long search, late requests against other rules, and how long it takes.

    Progress goes to stderr. Times of the solver are processor time of one core.

    Exit codes: 0 all was measured; 1 a part could not be; 2 wrong use.
    """
    parts = Parts(title="benchmark planner", figures=figures.FIGURES, only=only)
    plan = Plan(traces=traces, seed=seed, scale=0.05 if quick else 1.0, processes=processes, say=parts.progress.say, only=only)
    parts.measure(PARTS, plan)
    context = {"seed": seed, "quick": quick, "traces": None if traces is None else traces.name}
    parts.print_results(context, ("numba", "numpy", "pyomo", "highspy"), as_json=as_json)
