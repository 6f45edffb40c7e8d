"""The table of the matrix: a row for each cell."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from qlm_cli.console import columns
from qlm_load.compare.comparison import NAMES
from qlm_load.matrix.cells import BATCH_MAX
from qlm_load.matrix.figures import BEST, EVERY, INTERACTIVE, QLM, CellRuns, Margin, Option

CAPTION = (
    "points of requests in time, QLM above the best other policy: of the most urgent class and of all; in brackets the paired 95% "
    "interval over seeds; QLM / the other one"
)
HEADS = ("cell", "load", "urgent", "margin", "all", "margin", "over", "best batch", "makespan s", "backlog s", "tokens/s", "in time", "")


def print_table(console: Console, found: Sequence[CellRuns]) -> None:
    """Prints the table without cells in which QLM or all others did not run."""
    table = Table(*columns(HEADS, HEADS[1:-1], overflow="fold"))
    for each in found:
        if each.best_rival(EVERY) is not None and (QLM, BATCH_MAX) in each.runs:
            table.add_row(*_row(each))
    console.print(CAPTION, style="italic", highlight=False, soft_wrap=True)
    console.print(table)


def _row(each: CellRuns) -> list[str]:
    own, rival = (QLM, BATCH_MAX), each.best_rival(EVERY)
    assert rival is not None
    pairs = [
        f"{each.mean(own, name):,.0f} / {each.mean(rival, name):,.0f}"
        for name in ("makespan_s", "backlog_s", "tokens_per_s", "in_time_tokens_per_s")
    ]
    best = each.margin(EVERY, BEST)
    return [
        each.cell.key,
        f"{each.cell.load:.2f}",
        f"{each.mean(own, INTERACTIVE):.1f}",
        _points(each.margin(INTERACTIVE)),
        f"{each.mean(own, EVERY):.1f}",
        _points(each.margin(EVERY)),
        name_of(rival),
        "" if best is None else f"{best.points:+.1f} {name_of(best.rival)}",
        *pairs,
        " ".join(f"below ({kind})" for kind in each.failures()),
    ]


def _points(margin: Margin | None) -> str:
    if margin is None:
        return ""
    return f"{margin.points:+.1f}" + (f" [{margin.low:+.1f}, {margin.high:+.1f}]" if margin.high > margin.low else "")


def name_of(option: Option) -> str:
    policy, at, own = option[0].partition("@")
    name = NAMES.get(policy, policy) + at + own
    return name if option[1] == BATCH_MAX else f"{name}, {option[1]}"
