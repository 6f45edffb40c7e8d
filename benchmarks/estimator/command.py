"""The command `estimator`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from benchmarks.estimator import figures
from benchmarks.estimator.figures import BY_KEY, FIGURES, LENGTHS, SPEED
from benchmarks.estimator.runs import Plan, judged_by_name, measure_runs, seeds_of
from benchmarks.estimator.single import PREDICTED_MAX
from benchmarks.figures import Value, Values, document, print_table
from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import ConfigError
from qlm_load.picture.command import NEEDS, can_draw
from qlm_load.progress import Progress


@click.command()
@click.option("--traces", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of the public traces.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line instead of a table.")
@click.option("--seeds", default="1-5", show_default=True, help="Of noise, hidden bias and the spreading of ticks: 1-5, or 1,3,7.")
@click.option("--only", multiple=True, type=click.Choice([*BY_KEY]), help="A key; may be repeated. Default: all.")
@click.option("--plot", is_flag=True, help="Draw predicted against actual and the reliability diagram of what is measured.")
@click.option("--rows-max", type=click.IntRange(min=100), help="Only so many requests of each trace: a quick look, no figures to report.")
@click.option("--predicted-max", type=click.IntRange(min=50), default=PREDICTED_MAX, show_default=True, help="Requests predicted in a run.")
@click.option("--processes", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True, help="Runs at a time.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/estimator"), show_default=True, help="Folder.")
def estimator(
    traces: Path,
    as_json: bool,
    seeds: str,
    only: tuple[str, ...],
    plot: bool,
    rows_max: int | None,
    predicted_max: int,
    processes: int,
    out: Path,
) -> None:
    """Measure the estimator: predictions made at arrival against the simulated engines' own step-accurate timing.

    Progress goes to stderr.

    Exit codes: 0 all was measured; 1 matplotlib is missing for --plot; 2 wrong use.
    """
    if plot and not can_draw():
        raise click.ClickException(NEEDS)
    progress = Progress()
    keys = tuple(only) or tuple(BY_KEY)
    try:
        plan = Plan(traces=traces, seeds=seeds_of(seeds), rows_max=rows_max, predicted_max=predicted_max, processes=processes)
        runs = measure_runs(figures.runs_of(keys), plan, progress.say)
        more: dict[str, object] = {"runs": {name: [figures.details(run) for run in found] for name, found in runs.items()}}
        values = {**figures.values_of(keys, runs), **_of_others(keys, plan, progress.say, more)}
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if plot:
        from benchmarks.estimator.plots import write_plots  # late: matplotlib takes a second

        for path in write_plots(judged_by_name(runs), out):
            progress.say(f"wrote {path}")
    context = {
        "seeds": list(plan.seeds),
        "rows_max": rows_max,
        "predicted_max": predicted_max,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "wall_s": round(progress.wall_s, 1),
        **more,
    }
    if as_json:
        click.echo(json.dumps(document(values, context, FIGURES)))
    else:
        print_table(plain_console(), values, FIGURES, "benchmark estimator")


def _of_others(keys: Sequence[str], plan: Plan, say: Callable[[str], None], more: dict[str, object]) -> Values:
    """Figures that need no run of an engine."""
    values: Values = {}
    parts = {BY_KEY[key].part for key in keys}
    if SPEED in parts:
        from benchmarks.estimator.speed import measure_speed

        say("speed")
        speed = measure_speed(plan.seeds[0])
        more["speed"] = speed
        if "predictions_per_s" in keys:
            values["predictions_per_s"] = {"vectorised": speed.get("predictions_per_s")}
        if "assess_ms" in keys:
            values["assess_ms"] = speed.get("assess_ms")
    if LENGTHS in parts:
        from benchmarks.estimator.lengths import measure_lengths

        say("lengths")
        lengths = measure_lengths(plan.traces, plan.seeds)
        more["lengths"] = lengths
        gains: dict[str, Value] = {name: found["mean"] for name, found in lengths["length_mae_gain"].items()}
        values["length_mae_gain"] = gains
    return values
