"""The command `planner`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import click

from benchmarks.parts import Parts
from benchmarks.planner.figures import BY_KEY, FIGURES
from benchmarks.planner.parts import MEASURES, Plan, measure


@click.command()
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of public traces: also queues as they stand there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line instead of a table.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="The first of the problems' seeds.")
@click.option("--only", multiple=True, type=click.Choice([*BY_KEY]), help="A key; may be repeated. Default: all.")
@click.option("--quick", is_flag=True, help="Few cases: shows that all parts run; the figures mean nothing.")
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True, help="Cases at a time.")
def planner(traces: Path | None, as_json: bool, seed: int, only: tuple[str, ...], quick: bool, processes: int) -> None:
    """Measure the planner: proven optima hit, the gap to a long search, late requests against other rules, and how long it takes.

    Progress goes to stderr. Times of the solver are processor time of one core.

    Exit codes: 0 all was measured; 1 a part could not be; 2 wrong use.
    """
    parts = Parts(title="benchmark planner", figures=FIGURES, only=only)
    plan = Plan(traces=traces, seed=seed, scale=0.05 if quick else 1.0, processes=processes, say=parts.progress.say, only=only)
    for name in MEASURES:
        parts.measure(name, partial(measure, name), plan)
    context = {"seed": seed, "quick": quick, "traces": None if traces is None else traces.name}
    parts.print_results(context, ("numba", "numpy", "pyomo", "highspy"), as_json=as_json)
