"""The picture of the matrix: where QLM wins and loses, against each policy, in points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qlm_load.matrix.cells import BATCH_MAX
from qlm_load.matrix.figures import EVERY, INTERACTIVE, QLM, CellRuns, Option
from qlm_load.matrix.table import name_of

POINTS_SHOWN = 40.0
"""Colours end here."""
PNG_DPI = 130
PANELS = ((INTERACTIVE, "most urgent class"), (EVERY, "all requests"))


def write_picture(found: Sequence[CellRuns], path: Path) -> None:
    """A row for each cell, a column for each policy as shipped; blue where QLM has more requests in time, red where fewer."""
    shown = [each for each in found if (QLM, BATCH_MAX) in each.runs]
    rivals: list[Option] = list(dict.fromkeys(option for each in shown for option in each.rivals("shipped")))
    if not rivals:
        return
    with mpl.rc_context({"font.size": 8.0}):
        figure = Figure(figsize=(5.0 + 1.5 * len(rivals), max(3.2, 1.2 + 0.26 * len(shown))), layout="constrained")
        FigureCanvasAgg(figure)
        axes_of = figure.subplots(1, len(PANELS), sharey=True, squeeze=False)[0]
        for axes, (name, title) in zip(axes_of, PANELS, strict=True):
            points = np.array([[_points(each, option, name) for option in rivals] for each in shown])
            image = axes.imshow(points, cmap="RdBu", vmin=-POINTS_SHOWN, vmax=POINTS_SHOWN, aspect="auto")
            for row, column in np.argwhere(np.isfinite(points)):
                value = points[row, column]
                axes.text(
                    column, row, f"{value:+.0f}", ha="center", va="center", color="white" if abs(value) > 0.6 * POINTS_SHOWN else "black"
                )
            axes.set_xticks(range(len(rivals)), [name_of(option) for option in rivals], rotation=30, ha="right")
            axes.set_yticks(range(len(shown)), [each.cell.key for each in shown])
            axes.set_title(title)
        figure.colorbar(image, ax=axes_of, label="points of requests in time, QLM above the policy", shrink=0.6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=PNG_DPI)


def _points(each: CellRuns, option: Option, name: str) -> float:
    return each.mean((QLM, BATCH_MAX), name) - each.mean(option, name) if option in each.runs else np.nan
