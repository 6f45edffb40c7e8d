"""Pictures of the bench: predicted against actual as figures 3 and 17 of QLM, and the reliability diagram."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.estimator.scores import LEVELS, Floats, Judged, coverage, r2

STYLE: Any = {"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
DOTS_MAX = 4_000
"""Requests drawn for one run; of more, every so manieth."""
COLUMNS = 4
"""Runs side by side in a picture."""
PNG_DPI = 130
WAIT, COMPLETION, RELIABILITY = "wait.png", "completion.png", "reliability.png"


def write_plots(runs: Mapping[str, Sequence[Judged]], folder: Path) -> Iterator[Path]:
    """Draws all runs, with all their seeds, and gives the paths of the files."""
    if not runs:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, figure in (
            (WAIT, _against(runs, "waiting time", lambda judged: (judged.wait_s, judged.actual_wait_s))),
            (COMPLETION, _against(runs, "completion time", lambda judged: (judged.completion_s, judged.actual_completion_s))),
            (RELIABILITY, _reliability(runs)),
        ):
            FigureCanvasAgg(figure)
            figure.savefig(folder / name, dpi=PNG_DPI)
            yield folder / name


def _against(runs: Mapping[str, Sequence[Judged]], what: str, pick: Any) -> Figure:
    columns = min(COLUMNS, len(runs))
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(4.2 * columns, 4.2 * rows), layout="constrained")
    for number, (name, parts) in enumerate(runs.items(), start=1):
        axes = figure.add_subplot(rows, columns, number)
        pairs = [pick(judged) for judged in parts]
        predicted, actual = (np.concatenate(each) for each in zip(*pairs, strict=True))
        _scatter(axes, predicted, actual)
        each = [r2(*pair) for pair in pairs]
        axes.set_title(f"{name}: R² {np.mean(each):.3f} ({min(each):.3f} to {max(each):.3f})")
        axes.set_xlabel(f"predicted {what} [s]")
        if number % columns == 1 or columns == 1:
            axes.set_ylabel(f"actual {what} [s]")
    return figure


def _scatter(axes: Axes, predicted: Floats, actual: Floats) -> None:
    step = max(1, len(predicted) // DOTS_MAX)
    axes.scatter(predicted[::step], actual[::step], s=4, alpha=0.35, linewidths=0, color="#2b6cb0")
    most = float(max(predicted.max(), actual.max()))
    axes.plot([0.0, most], [0.0, most], color="#444444", linewidth=0.9)


def _reliability(runs: Mapping[str, Sequence[Judged]]) -> Figure:
    """Share of the outcomes within each predicted quantile: on the diagonal it is right."""
    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    for place, (what, within) in enumerate((("wait", Judged.wait_within), ("completion", Judged.completion_within)), start=1):
        axes = figure.add_subplot(1, 2, place)
        axes.plot([0, 100], [0, 100], color="#444444", linewidth=0.9)
        for name, parts in runs.items():
            found = [np.mean([coverage(within(judged, level)) for judged in parts]) for level in LEVELS]
            axes.plot([100.0 * level for level in LEVELS], found, marker="o", markersize=3, linewidth=1.2, label=name)
        axes.set_title(what)
        axes.set_xlabel("predicted quantile [%]")
        axes.set_ylabel("within it [%]")
        axes.legend(frameon=False)
    return figure
