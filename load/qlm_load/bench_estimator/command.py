"""The command `bench estimator`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import numpy as np

from qlm.cli.console import plain_console
from qlm_core.errors import ConfigError
from qlm_load.bench.figures import Value, Values, document, print_table
from qlm_load.bench.parts import Progress
from qlm_load.bench_estimator import figures
from qlm_load.bench_estimator.figures import BESIDE, BY_KEY, FIGURES, LENGTHS, POINTS, SERVEGEN, SHIFT_NAMES, SINGLES, SPEED
from qlm_load.bench_estimator.runs import Plan, by_name, measure_runs, seeds_of
from qlm_load.bench_estimator.scores import Judged, coverage, farthest, mape_by_depth, spread
from qlm_load.bench_estimator.single import PREDICTED_MAX
from qlm_load.picture.command import NEEDS, can_draw


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
        values, more = _values(keys, runs, plan, progress.say)
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if plot:
        from qlm_load.bench_estimator.plots import write_plots  # late: matplotlib takes a second

        for path in write_plots(by_name(runs, (*SINGLES, *BESIDE, "multi")), out):
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
        print_table(plain_console(), values, FIGURES, "bench estimator")


def _values(
    keys: Sequence[str], runs: Mapping[str, Sequence[Judged]], plan: Plan, say: Callable[[str], None]
) -> tuple[Values, dict[str, object]]:
    """The figures of the keys, and what is told beside them."""
    values: Values = {}
    over_seeds: dict[str, object] = {}
    for key in ("r2_wait_azure", "r2_wait_mooncake", "r2_wait_multi"):
        if key in keys:
            found = [figures.r2_wait(judged) for judged in runs[key.removeprefix("r2_wait_")]]
            values[key], over_seeds[key] = round(spread(found)["mean"], 5), found
    if "r2_wait_servegen" in keys:
        waits = {name: [figures.r2_wait(judged) for judged in runs[name]] for name in (*SERVEGEN, *BESIDE)}
        over_seeds["r2_wait_servegen"] = waits
        values["r2_wait_servegen"] = round(min(spread(waits[name])["mean"] for name in SERVEGEN), 5)
    values.update({name: _beside(parts) for name, parts in by_name(runs, BESIDE).items()})
    if "mape_wait_by_depth" in keys:
        values["mape_wait_by_depth"] = {point: max(_mape_beyond_first(runs[name]) for name in names) for point, names in POINTS.items()}
    if "r2_completion" in keys:
        of_run = {name: [figures.r2_completion(judged) for judged in runs[name]] for name in (*SINGLES, *BESIDE)}
        over_seeds["r2_completion"] = of_run
        values["r2_completion"] = round(float(np.mean([of_run[name] for name in SINGLES])), 5)
    more: dict[str, object] = {}
    if "p90_coverage" in keys:
        cells = figures.p90_cells(runs)
        flat = [value for found in cells.values() for value in found]
        values["p90_coverage"] = {"mean": round(float(np.mean(flat)), 2), "worst": farthest(flat, 90.0)}
        more["p90_cells"] = cells
        more["p90_cells_beside"] = {name: figures.run_cells(runs[name]) for name in (*SINGLES, *BESIDE)}
    if "p90_coverage_after_shift" in keys:
        after = {name: [_wait_p90(judged) for judged in runs[name]] for name in SHIFT_NAMES}
        over_seeds["p90_coverage_after_shift"] = after
        values["p90_coverage_after_shift"] = {name: round(float(np.mean(found)), 2) for name, found in after.items()}
    values.update(_of_others(keys, plan, say, more))
    more["over_seeds"] = over_seeds
    more["runs"] = {name: [figures.details(judged) for judged in found] for name, found in runs.items()}
    return values, more


def _of_others(keys: Sequence[str], plan: Plan, say: Callable[[str], None], more: dict[str, object]) -> Values:
    """Figures that need no run of an engine."""
    values: Values = {}
    parts = {BY_KEY[key].part for key in keys}
    if SPEED in parts:
        from qlm_load.bench_estimator.speed import measure_speed

        say("speed")
        speed = measure_speed(plan.seeds[0])
        more["speed"] = speed
        if "predictions_per_s" in keys:
            values["predictions_per_s"] = {"vectorised": speed.get("predictions_per_s"), "scalar": speed.get("scalar_predictions_per_s")}
        if "assess_ms" in keys:
            values["assess_ms"] = speed.get("assess_ms")
    if LENGTHS in parts:
        from qlm_load.bench_estimator.lengths import measure_lengths

        say("lengths")
        lengths = measure_lengths(plan.traces, plan.seeds)
        more["lengths"] = lengths
        gains: dict[str, Value] = {name: found["mean"] for name, found in lengths["length_mae_gain"].items()}
        values["length_mae_gain"] = gains
    return values


def _mape_beyond_first(parts: Sequence[Judged]) -> float:
    """The worst decile but the first, each in the mean over the seeds."""
    deciles = np.mean([mape_by_depth(judged) for judged in parts], axis=0)
    return round(float(deciles[1:].max()), 2)


def _beside(parts: Sequence[Judged]) -> dict[str, Value]:
    """What is told of runs that no other figure is over."""
    return {
        "r2_wait": round(float(np.mean([figures.r2_wait(judged) for judged in parts])), 5),
        "r2_completion": round(float(np.mean([figures.r2_completion(judged) for judged in parts])), 5),
        "p90_wait": round(float(np.mean([_wait_p90(judged) for judged in parts])), 2),
    }


def _wait_p90(judged: Judged) -> float:
    return round(coverage(judged.wait_within(figures.Z[0.9])), 2)
