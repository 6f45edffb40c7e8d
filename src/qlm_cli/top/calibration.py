"""How predictions compare with what happened, as a table of `qlm top`. Pure."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from qlm_process.cluster.view import CalibrationRowView, CalibrationView

ROWS_SHOWN_MAX = 8
"""Rows of models on GPUs in a frame, most samples first, after the two of all; the others, and those of each depth, are in `--json`."""
R2_SHOWN_MIN = -10.0
SAMPLES_MIN = 30
"""Shares of fewer predictions are not coloured: they say little."""
LEVELS = (0.5, 0.9, 0.99)


def calibration_table(calibration: CalibrationView) -> Table:
    """Waits and completions as clients were told: how many came by the predicted p50, p90 and p99, by how much later than the median they
    came in the mean, R2 of the medians, and the pinball loss of the p90."""
    table = Table(title="predicted against actual", title_justify="left", box=None, padding=(0, 2, 0, 0), caption_justify="left")
    for heading in ("", "model", "GPU"):
        table.add_column(heading, header_style="dim", no_wrap=True)
    for heading in ("came", "by p50", "by p90", "by p99", "late by", "R2", "pinball p90"):
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    for row in shown_rows(calibration):
        table.add_row(*_cells(row))
    if not calibration.rows:
        table.add_row(Text("no prediction came yet" if not calibration.samples else f"{calibration.samples:,} came", style="dim"))
    return table


def depth_table(calibration: CalibrationView) -> Table:
    """The same by how many requests were ahead, over all models and GPUs."""
    table = Table(title="predicted against actual, by requests ahead", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("ahead", "came", "wait by p90", "R2", "completion by p90", "R2"):
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    rows = {(row.time, row.depth): row for row in calibration.rows if row.depth and not row.model and not row.gpu}
    for depth in dict.fromkeys(depth for _, depth in rows):
        wait, completion = rows.get(("wait", depth)), rows.get(("completion", depth))
        came = max(row.samples for row in (wait, completion) if row is not None)
        table.add_row(_ahead(depth), f"{came:,}", *_p90_and_r2(wait), *_p90_and_r2(completion))
    return table


def _ahead(depth: str) -> str:
    """A depth class as the requests that it is of: "5 - 16"."""
    most = depth.rstrip("+")
    if depth.endswith("+") or int(most) <= 1:
        return f"> {int(most):,}" if depth.endswith("+") else most
    return f"{int(most) // 4 + 1:,} - {int(most):,}"


def _p90_and_r2(row: CalibrationRowView | None) -> tuple[Text | str, str]:
    if row is None:
        return "-", "-"
    return _share(row.within_p90, 0.9, row.samples), _r2(row)


def shown_rows(calibration: CalibrationView) -> list[CalibrationRowView]:
    """All together, then models on GPUs."""
    together = [row for row in calibration.rows if not row.model and not row.gpu and not row.depth]
    of_models = [row for row in calibration.rows if row.model and not row.depth]
    came = {(row.model, row.gpu): row.samples for row in of_models if row.time == "completion"}
    models = sorted(of_models, key=lambda row: (-came.get((row.model, row.gpu), 0), row.model, row.gpu))
    return together + models[:ROWS_SHOWN_MAX]


def _cells(row: CalibrationRowView) -> tuple[Text | str, ...]:
    shares = (row.within_p50, row.within_p90, row.within_p99)
    return (
        row.time,
        row.model or "all",
        row.gpu or "all",
        f"{row.samples:,}",
        *(_share(share, level, row.samples) for share, level in zip(shares, LEVELS, strict=True)),
        f"{row.bias_s:,.1f} s",
        _r2(row),
        f"{row.pinball_p90_s:,.2f} s",
    )


def _r2(row: CalibrationRowView) -> str:
    """Far below zero it says only that all that came took about equally long."""
    return "-" if row.r2 is None else f"{row.r2:.3f}" if row.r2 > R2_SHOWN_MIN else f"< {R2_SHOWN_MIN:g}"


def _share(share: float, level: float, samples: int) -> Text:
    """Green within three standard errors of the level, yellow within ten percent points, else red."""
    text = f"{share:.0%}"
    if samples < SAMPLES_MIN:
        return Text(text, style="dim")
    error = 3.0 * (level * (1.0 - level) / samples) ** 0.5
    return Text(text, style="green" if abs(share - level) <= error else "yellow" if abs(share - level) <= 0.1 else "red")
