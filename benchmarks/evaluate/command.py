"""The command `evaluate`."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import click

from benchmarks.evaluate.fastserve import MODELS, Plan
from benchmarks.evaluate.rows import Row, print_rows
from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import ConfigError
from qlm_load.progress import Progress

TABLE_WIDTH = 140
SEEDS = (1, 2, 3)
"""Seeds of a paper that has no SEEDS of its own."""


@click.command()
@click.option("--paper", type=click.Choice(["fastserve", "larry", "uellm"]), required=True, help="Whose claims.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for PAPER.json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line instead of a table.")
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of public traces (lengths_sharegpt.csv.gz, lengths_alpaca.csv.gz); without: lognormal lengths with their quantiles. "
    "For larry azure_conv_2023.csv.gz, which it needs.",
)
@click.option("--seed", "seeds", multiple=True, type=click.IntRange(min=0), help="May be repeated. Default: 1 to 3; uellm: 1 to 5.")
@click.option(
    "--duration", "duration_s", type=click.FloatRange(min=1.0), default=60.0, show_default=True, help="Seconds in which jobs arrive."
)
@click.option("--model", "models", multiple=True, type=click.Choice([*MODELS]), default=tuple(MODELS), help="Of the rates. Default: all.")
@click.option("--only", multiple=True, help="A part of the paper's; may be repeated. Default: all.")
@click.option(
    "--weights",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a real model (`qlm models add smollm2`) for uellm's part pipeline; without it that part is left out.",
)
@click.option("--quick", is_flag=True, help="Few and short cases: shows that all parts run; the figures mean nothing.")
def evaluate(
    paper: str,
    out: Path,
    as_json: bool,
    traces: Path | None,
    seeds: tuple[int, ...],
    duration_s: float,
    models: tuple[str, ...],
    only: tuple[str, ...],
    weights: Path | None,
    quick: bool,
) -> None:
    """Measure a paper's claims: claim, ours with the 95% interval, their ratio, and whether the order holds.

    Virtual time, the same engine for all rows. Progress goes to stderr. Exit codes: 0 measured, 2 wrong use.
    """
    module = import_module(f"benchmarks.evaluate.{paper}")
    parts, seeds = module.PARTS, seeds or getattr(module, "SEEDS", SEEDS)
    if unknown := set(only) - set(parts):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: may be {', '.join(parts)}", param_hint="--only")
    progress = Progress()
    plan = Plan(
        traces=traces,
        seeds=seeds[:1] if quick else seeds,
        duration_s=5.0 if quick else duration_s,
        models=models[:1] if quick else models,
        only=only,
        say=progress.say,
        weights=weights,
    )
    rows: list[Row] = []
    for name, part in parts.items():
        if not only or name in only:
            try:
                rows += part(plan)
            except ConfigError as error:
                raise click.UsageError(error.message) from error
            progress.say(f"{name} measured")
    report = {
        "paper": paper,
        "rows": {row.name: row.document() for row in rows},
        "context": {
            "seeds": list(plan.seeds),
            "duration_s": plan.duration_s,
            "quick": quick,
            "traces": None if traces is None else traces.name,
            "wall_s": round(progress.wall_s, 1),
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{paper}.json").write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_rows(plain_console(width=TABLE_WIDTH), rows, f"evaluate {paper}")
