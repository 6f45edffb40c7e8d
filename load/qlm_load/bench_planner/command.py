"""The command `bench planner`."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console

from qlm_core.errors import ConfigError, QlmError
from qlm_load.bench.figures import Values, document, print_table
from qlm_load.bench_planner.figures import BY_KEY, FIGURES
from qlm_load.bench_planner.parts import MEASURES, Plan

EXIT_FAILED = 1


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
    started_s = time.monotonic()
    progress = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        progress.print(f"{time.monotonic() - started_s:6.1f} s  {text}", markup=False)

    plan = Plan(traces=traces, seed=seed, scale=0.05 if quick else 1.0, processes=processes, say=say)
    wanted = {BY_KEY[key].part for key in only or BY_KEY}
    values: Values = {}
    details: dict[str, object] = {}
    failures: dict[str, str] = {}
    for part, measure in MEASURES.items():
        if part not in wanted:
            continue
        began_s = time.monotonic()
        try:
            measured = measure(plan)
        except ConfigError as error:
            raise click.UsageError(error.message) from error
        except QlmError as error:
            failures[part] = error.message
            say(f"{part} FAILED: {error.message}")
            continue
        values |= {key: value for key, value in measured.values.items() if not only or key in only}
        details[part] = {**measured.details, "took_s": round(time.monotonic() - began_s, 1)}
    context = {
        "seed": seed,
        "quick": quick,
        "traces": None if traces is None else traces.name,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("numba", "numpy", "pyomo", "highspy")},
        "wall_s": round(time.monotonic() - started_s, 1),
        "failures": failures,
        "parts": details,
    }
    if as_json:
        click.echo(json.dumps(document(values, context, FIGURES)))
    else:
        print_table(Console(), values, FIGURES, "bench planner")
    if failures:
        sys.exit(EXIT_FAILED)
