"""The command `matrix`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import ConfigError
from qlm_load.compare.comparison import check_policy
from qlm_load.progress import Progress
from qlm_process.config import parse_override

if TYPE_CHECKING:
    from qlm_load.matrix.figures import CellRuns
    from qlm_load.matrix.runs import CellTask

POLICIES = ("slo", "fcfs", "edf", "least_loaded", "shepherd", "batched")
BATCHES = (32, 48, 64, 96)
"""Values of `batch_max` that the other policies also have with `--best`, beside the shipped one."""
SEEDS, QUICK_SEEDS = "1-3", "1"
EXIT_FAILED = 1
TABLE_WIDTH = 220


@click.command()
@click.option("--only", default="", metavar="TEXT", help="Only cells whose key has this in it; steady_state runs only so, or with --quick.")
@click.option(
    "--policies",
    default=",".join(POLICIES),
    show_default=True,
    metavar="LIST",
    help="Each NAME or module:Class, @SETTING=VALUE;... behind it.",
)
@click.option("--seeds", metavar="LIST", help=f'Of requests and engines: "1-3" or "1,5".  [default: {SEEDS}; with --quick {QUICK_SEEDS}]')
@click.option("--best", is_flag=True, help=f"The other policies also with batch_max {', '.join(map(str, BATCHES))}.")
@click.option("--set", "settings", multiple=True, metavar="SECTION.NAME=VALUE", help="A setting of all clusters; may be repeated.")
@click.option("--quick", is_flag=True, help="Fewer cells, a shorter steady state and one seed: a quarter of an hour.")
@click.option("--cells-seed", type=click.IntRange(min=0), help="Draw other cells than the published ones, to check with.")
@click.option("--processes", type=click.IntRange(min=1), default=2, show_default=True, help="Runs at a time.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures and runs to this file.")
@click.option("--picture", "picture_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw wins and losses to this PNG file.")
@click.option("--list", "list_only", is_flag=True, help="Print the cells and end.")
def matrix(
    only: str,
    policies: str,
    seeds: str | None,
    best: bool,
    settings: tuple[str, ...],
    quick: bool,
    cells_seed: int | None,
    processes: int,
    json_path: Path | None,
    picture_path: Path | None,
    list_only: bool,
) -> None:
    """Measure QLM against the other policies on a matrix of workloads, in virtual time.

    Cells are named ones and 24 drawn by a published seed from numbers of models and instances, GPUs, SLO classes, arrivals, lengths and
    load. All policies get the same requests; clients name a round max_tokens well above their answers. A cell fails if the 95% interval of
    its margin over the best other policy lies below -1 point, or -2 points with the best batch of that policy. Progress goes to stderr.

    Exit codes: 0 done; 1 a run failed; 2 wrong use. A cell below its target is reported and does not change the code.
    """
    from qlm_load.matrix.cells import BATCH_MAX, CELLS_SEED, cells  # late: these load all services
    from qlm_load.matrix.figures import QLM, STEADY, CellRuns
    from qlm_load.matrix.runs import CellTask

    drawn_by = CELLS_SEED if cells_seed is None else cells_seed
    chosen = [cell for cell in cells(drawn_by, quick=quick) if only in cell.key and (only or quick or not cell.key.startswith(STEADY))]
    variants, seed_list = _variants(policies), _seeds(seeds or (QUICK_SEEDS if quick else SEEDS))
    if not chosen:
        raise click.BadParameter(f"no cell has {only!r} in its key; --list shows them", param_hint="--only")
    if list_only:
        for cell in chosen:
            click.echo(f"{cell.key}: {cell.requests} requests, {cell.rate_per_s:.2f}/s, load {cell.load:.2f}, inside {cell.inside}")
        return
    try:
        given = tuple(parse_override(text) for text in settings)
    except ConfigError as error:
        raise click.BadParameter(error.message, param_hint="--set") from error
    tasks = [
        CellTask(cell=cell, variant=variant, batch_max=batch_max, seed=seed, settings=given)
        for cell in chosen
        for seed in seed_list
        for variant in variants
        for batch_max in (BATCH_MAX, *(BATCHES if best and variant.partition("@")[0] != QLM else ()))
    ]
    found = {cell.key: CellRuns(cell=cell) for cell in chosen}
    context = {"cells_seed": drawn_by, "seeds": seed_list, "quick": quick, "settings": dict(given), "policies": variants}
    failed = _run_all(tasks, found, processes, lambda: _write(json_path, list(found.values()), context))
    _print(list(found.values()), picture_path)
    if failed:
        sys.exit(EXIT_FAILED)


def _run_all(tasks: Sequence[CellTask], found: dict[str, CellRuns], processes: int, written: Callable[[], None]) -> int:
    """Runs the tasks, `processes` at a time; returns how many failed."""
    from qlm_load.matrix.runs import run

    progress, failed = Progress(), 0
    with ProcessPoolExecutor(max_workers=processes) as pool:
        of = {pool.submit(run, task): task for task in tasks}
        left = {key: sum(task.cell.key == key for task in tasks) for key in found}
        for number, future in enumerate(as_completed(of), start=1):
            task = of[future]
            name = f"{number}/{len(tasks)} {task.cell.key} {task.variant} batch {task.batch_max} seed {task.seed}"
            left[task.cell.key] -= 1
            try:
                measures = future.result()
            except ConfigError as error:
                pool.shutdown(cancel_futures=True)
                raise click.UsageError(error.message) from error
            except Exception as error:  # a defect under one policy: the others' figures are not lost
                failed += 1
                progress.say(f"{name} FAILED: {type(error).__name__}: {error}")
            else:
                found[task.cell.key].add(task, measures)
                shares = f"interactive {measures.interactive:.1f}%, all {measures.every:.1f}%"
                progress.say(f"{name}: {shares}, makespan {measures.makespan_s:,.0f} s ({measures.real_s:.0f} s of a core)")
            if left[task.cell.key] == 0:
                written()
    return failed


def _write(path: Path | None, found: Sequence[CellRuns], context: dict[str, object]) -> None:
    """After each cell, so that an aborted run keeps its results."""
    from qlm_load.matrix.figures import document

    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document([each for each in found if each.runs], context), indent=1) + "\n", encoding="utf-8")


def _print(found: Sequence[CellRuns], picture_path: Path | None) -> None:
    from qlm_load.matrix.figures import document
    from qlm_load.matrix.picture import write_picture
    from qlm_load.matrix.table import print_table

    console = plain_console()
    print_table(console if console.is_terminal else plain_console(width=TABLE_WIDTH), found)
    figures = document([each for each in found if each.runs], {})
    click.echo(json.dumps({key: value for key, value in figures.items() if key != "cells"}))
    if picture_path is not None:
        write_picture(found, picture_path)


def _variants(text: str) -> list[str]:
    names = [part for part in text.split(",") if part]
    if not names:
        raise click.BadParameter("names no policy", param_hint="--policies")
    for name in names:
        check_policy(name.partition("@")[0], "--policies")
    return list(dict.fromkeys(names))


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last if dash else first) + 1)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not like 1-3 or 1,5", param_hint="--seeds") from error
    return list(dict.fromkeys(found))
