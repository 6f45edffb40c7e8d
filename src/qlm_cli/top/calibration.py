"""How predictions compare with what happened, as a table of `qlm top`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from qlm_cli.console import columns
from qlm_process.cluster.view import CalibrationRowView

R2_SHOWN_MIN = -10.0
SAMPLES_MIN = 30
"""Shares of fewer predictions are not coloured: they say little."""
LEVELS = (0.5, 0.9, 0.99)


def calibration_table(rows: Sequence[CalibrationRowView]) -> Table:
    """Waits and completions as clients were shown, over all and by the requests ahead: how many were within the predicted p50, p90 and p99,
    by how much later than the median they were on average, and R2 of the medians."""
    figures = ("ended", "by p50", "by p90", "by p99", "late by", "R2")
    headings = columns(("ahead", "", *figures), figures, header_style="dim", no_wrap=True)
    table = Table(*headings, title="predicted against actual", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*_cells(row))
    if not rows:
        table.add_row(Text("none ended yet", style="dim"))
    return table


def _ahead(depth: str) -> str:
    """A depth class as the requests that it is of: "5 - 16"."""
    most = depth.rstrip("+")
    if depth.endswith("+") or int(most) <= 1:
        return f"> {int(most):,}" if depth.endswith("+") else most
    return f"{int(most) // 4 + 1:,} - {int(most):,}"


def _cells(row: CalibrationRowView) -> tuple[Text | str, ...]:
    shares = (row.within_p50, row.within_p90, row.within_p99)
    return (
        _ahead(row.depth) if row.depth else "any",
        row.time,
        f"{row.samples:,}",
        *(_share(share, level, row.samples) for share, level in zip(shares, LEVELS, strict=True)),
        f"{row.bias_s:,.1f} s",
        _r2(row),
    )


def _r2(row: CalibrationRowView) -> str:
    """Far below zero it shows only that all took about equally long."""
    return "-" if row.r2 is None else f"{row.r2:.3f}" if row.r2 > R2_SHOWN_MIN else f"< {R2_SHOWN_MIN:g}"


def _share(share: float, level: float, samples: int) -> Text:
    """Green within three standard errors of the level, yellow within ten percent points, else red."""
    text = f"{share:.0%}"
    if samples < SAMPLES_MIN:
        return Text(text, style="dim")
    error = 3.0 * (level * (1.0 - level) / samples) ** 0.5
    return Text(text, style="green" if abs(share - level) <= error else "yellow" if abs(share - level) <= 0.1 else "red")
