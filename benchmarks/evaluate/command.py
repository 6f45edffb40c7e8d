"""The command `evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.table import Table

from benchmarks.estimator.runs import seeds_of
from benchmarks.evaluate import uellm
from qlm_cli.console import plain_console
from qlm_load.progress import Progress

PAPERS = ("uellm",)
TABLE_WIDTH = 140


@click.command()
@click.option("--paper", type=click.Choice(PAPERS), required=True, help="The paper whose claims are measured.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="DIR", help="Folder of PAPER.json.")
@click.option("--seeds", default="1-5", show_default=True, help="One a trial: 1-5, or 1,3,7.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line instead of a table.")
def evaluate(paper: str, out: Path, seeds: str, as_json: bool) -> None:
    """Measure a paper's claims on QLM: each with what the paper states, ours with its 95% interval, and whether the order holds.

    Progress goes to stderr. Exit codes: 0 all was measured, whether it holds or not; 2 wrong use.
    """
    progress = Progress()
    try:
        trials = seeds_of(seeds)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--seeds") from error
    rows, means = uellm.Evaluation(seeds=trials, say=progress.say).measure()
    document = {
        "paper": paper,
        "seeds": list(trials),
        "claims": [row.as_json for row in rows],
        "means": means,
        "wall_s": round(progress.wall_s, 1),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{paper}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(document))
        return
    table = Table("claim", "paper", "ours", "95%", "holds", title=f"{paper}, {len(trials)} trials", title_justify="left")
    for row in rows:
        table.add_row(row.claim, row.paper, f"{row.ours:.3g}", f"{row.low:.3g} to {row.high:.3g}", "yes" if row.held else "no")
    plain_console(width=TABLE_WIDTH).print(table)
