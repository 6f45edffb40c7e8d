"""Draws a recording with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qlm_load.picture import palette, spans
from qlm_load.picture.palette import CLASS_LINES, DIM, DOWN, FAINT, GRID, INK, KILL, PAPER
from qlm_load.picture.recording import Recording

WIDTH_IN = 15.0
LEFT_SHARE, RIGHT_SHARE = 0.078, 0.838
"""Left and right edges of the axes; labels are right of them."""
HEAD_IN, FOOT_IN, TITLE_IN, KILLS_IN = 1.5, 0.62, 0.3, 0.5
QUEUE_IN, BAND_IN, BAND_GAP_IN, GAP_IN = 2.2, 0.36, 0.05, 0.2
UNPLACED_IN, SHARE_IN, LANE_IN = 0.42, 1.5, 0.23
"""Heights, from the top down: the head; for each instance its title, queue and band; then the rest, each with a title."""
PNG_DPI = 130
LABEL_SHARE_MIN = 0.075
"""A model's name is written into its band where the span is at least this share of the run."""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 1.1,
    "text.parse_math": False,  # a "$" in a name is a "$"
    "svg.fonttype": "none",
    "svg.hashsalt": "qlm",
}
LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
KILL_ROWS = 3
KILL_NAME_SHARE = 0.085
"""Rows of names above the lines of kills, and the share of the run that one takes."""
LABEL_APART = 0.13
"""Least distance of two labels beside the shares, in shares."""
_RIGHT: dict[str, Any] = {
    "xycoords": ("axes fraction", "data"),
    "xytext": (8, 0),
    "textcoords": "offset points",
    "va": "center",
    "fontsize": 8.5,
    "annotation_clip": False,
}
"""A label right of the axes, at a position of its own."""
MARKERS = {"evicted": ("v", 30, "requests evicted"), "kv_offloaded": ("D", 16, "KV moved to host memory")}
"""Operations marked below the band of the model: marker, size, and name in the legend."""
COUNTED = {
    "models_warmed": "models warmed",
    "evicted": "requests evicted (▼)",
    "kv_offloaded": "KV to host memory (◆)",
    "kv_restored": "KV back",
}
"""Operations that are counted beside a queue."""


def draw(recording: Recording) -> Figure:
    """The whole picture. Its axes have labels ("queue:a100-0", "band:...", "share") by which a page finds them."""
    with mpl.rc_context(STYLE):
        instances, lanes = recording.instances, _lanes(recording)
        per_instance_in = TITLE_IN + QUEUE_IN + BAND_GAP_IN + BAND_IN + GAP_IN
        below_in = [UNPLACED_IN, SHARE_IN, LANE_IN * len(lanes)]
        height_in = HEAD_IN + KILLS_IN + per_instance_in * len(instances) + sum(TITLE_IN + each for each in below_in) + GAP_IN + FOOT_IN
        figure = Figure(figsize=(WIDTH_IN, height_in), facecolor=PAPER)
        place = _Places(figure, height_in, HEAD_IN + KILLS_IN)
        first: Axes | None = None
        for instance in instances:
            queue = place.below(TITLE_IN, QUEUE_IN)
            first = first or queue
            _queue(queue, recording, instance)
            _band(place.below(BAND_GAP_IN, BAND_IN), recording, instance)
            place.skip(GAP_IN)
        unplaced, share, processes = (place.below(TITLE_IN, each) for each in below_in)
        _unplaced(unplaced, recording)
        _share(share, recording)
        _processes(processes, recording, lanes)
        for ax in figure.axes:
            ax.set_xlim(0.0, max(recording.duration_s, 1.0))
            for kill in recording.kills:
                ax.axvline(kill.at_s, color=KILL, linewidth=0.9, linestyle=(0, (4, 2)), alpha=0.85, zorder=5)
            if ax is not processes:
                ax.tick_params(labelbottom=False)
        processes.set_xlabel(f"seconds of the run (real time; {recording.time_scale:g} trace seconds in each)")
        _head(figure, recording, height_in)
        if first is not None:
            _name_kills(first, recording)
    return figure


class _Places:
    """Axes from the top of the figure down, by their heights in inches."""

    def __init__(self, figure: Figure, height_in: float, from_top_in: float) -> None:
        self._figure = figure
        self._height_in = height_in
        self._used_in = from_top_in

    def below(self, gap_in: float, height_in: float) -> Axes:
        self._used_in += gap_in + height_in
        bottom = 1.0 - self._used_in / self._height_in
        return self._figure.add_axes((LEFT_SHARE, bottom, RIGHT_SHARE - LEFT_SHARE, height_in / self._height_in))

    def skip(self, gap_in: float) -> None:
        self._used_in += gap_in


def write_png(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    with mpl.rc_context(STYLE):
        figure.savefig(path, dpi=PNG_DPI)


def _head(figure: Figure, recording: Recording, height_in: float) -> None:
    def line(inches: float) -> float:
        return 1.0 - inches / height_in

    figure.text(LEFT_SHARE, line(0.42), "Virtual queues over time", fontsize=17, fontweight="bold", color=INK)
    figure.text(
        LEFT_SHARE,
        line(0.7),
        f"{recording.title}. Each column is a queue at one moment, its head at the bottom.",
        fontsize=10,
        color=DIM,
    )
    classes = list(recording.classes)
    columns: list[list[Patch | Line2D]] = [
        [
            Patch(
                facecolor=palette.shade(recording.models, classes, model, slo_class),
                label=f"{model}, {slo_class} ({_slo(recording, slo_class)})",
            )
            for slo_class in classes
        ]
        for model in recording.models
    ]
    columns.append([Patch(facecolor=PAPER, edgecolor=INK, hatch="////", label="model swap"), Patch(facecolor=DOWN, label="agent away")])
    columns.append(
        [
            Line2D([], [], linestyle="none", marker=marker, markersize=math.sqrt(size), color=INK, label=text)
            for marker, size, text in MARKERS.values()
        ]
    )
    rows = max(len(column) for column in columns)
    blank = Line2D([], [], linestyle="none", label=" ")
    figure.legend(
        handles=[handle for column in columns for handle in (*column, *[blank] * (rows - len(column)))],
        loc="upper left",
        bbox_to_anchor=(LEFT_SHARE - 0.007, line(0.82)),
        ncols=len(columns),
        frameon=False,
        fontsize=8.5,
        handlelength=1.3,
        columnspacing=1.6,
        labelspacing=0.25,
    )


def _slo(recording: Recording, slo_class: str) -> str:
    seconds = recording.classes[slo_class]
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"


def _queue(ax: Axes, recording: Recording, instance: str) -> None:
    most = spans.waiting_max(recording)
    ax.set_label(f"queue:{instance}")
    ax.imshow(
        spans.queue_image(recording, instance, most),
        extent=(0.0, max(recording.duration_s, 1.0), 0.0, most),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        zorder=2,
    )
    ax.set_ylim(0.0, most * 1.04)
    ax.set_ylabel("waiting requests")
    ax.set_title(instance, loc="left", fontsize=11, fontweight="bold", color=INK, pad=4)
    ax.grid(axis="y", color=GRID, linewidth=0.8, zorder=0)
    counts = spans.operation_counts(recording, instance)
    lines = [f"{len(spans.model_swap_spans(recording, instance)):,} model swaps seen"]
    lines += [f"{counts[what]:,} {text}" for what, text in COUNTED.items() if counts.get(what)]
    ax.annotate(
        "\n".join(lines), (1.0, 1.0), xycoords="axes fraction", xytext=(8, 0), textcoords="offset points",
        va="top", fontsize=8.5, color=DIM, linespacing=1.6,
    )  # fmt: skip


def _band(ax: Axes, recording: Recording, instance: str) -> None:
    ax.set_label(f"band:{instance}")
    ax.set_ylim(0.0, 1.0)
    ax.set_yticks([])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.tick_params(bottom=False)
    ax.set_ylabel("active\nmodel", rotation=0, ha="right", va="center", labelpad=8)
    for span in spans.model_spans(recording, instance):
        if span.label:
            ax.axvspan(span.from_s, span.to_s, 0.18, 1.0, color=palette.hue(recording.models, span.label), linewidth=0)
            if span.to_s - span.from_s >= LABEL_SHARE_MIN * recording.duration_s:
                ax.text((span.from_s + span.to_s) / 2, 0.58, span.label, ha="center", va="center", fontsize=8, color=PAPER)
    for span in spans.model_swap_spans(recording, instance):
        colour = palette.hue(recording.models, span.label)
        ax.axvspan(span.from_s, span.to_s, 0.18, 1.0, facecolor=PAPER, edgecolor=colour, hatch="////", linewidth=0)
    for span in spans.down_spans(recording, instance):
        ax.axvspan(span.from_s, span.to_s, 0.18, 1.0, color=DOWN, linewidth=0)
    for what, (marker, size, _) in MARKERS.items():
        times = [mark.at_s for mark in spans.operation_marks(recording, instance) if mark.what == what]
        ax.scatter(times, [0.02] * len(times), marker=marker, s=size, color=INK, linewidth=0, clip_on=False, zorder=6)


def _unplaced(ax: Axes, recording: Recording) -> None:
    ax.set_label("unplaced")
    times, counts = spans.unplaced(recording)
    ax.fill_between(times, counts, step="post", color=FAINT, linewidth=0)
    most = max([4, *counts])
    ax.set_ylim(0, most)
    ax.set_yticks([0, most])
    ax.set_title("accepted and not placed in a group yet: the planner is away, or busy", loc="left", fontsize=9.5, color=INK, pad=4)


def _share(ax: Axes, recording: Recording) -> None:
    ax.set_label("share")
    ax.set_title(f"SLO attainment of requests that ended in the last {spans.WINDOW_S:g} s", loc="left", fontsize=9.5, color=INK, pad=4)
    ax.set_ylim(0.0, 1.06)
    ax.set_yticks([0.0, 0.5, 1.0], ["0%", "50%", "100%"])
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    last: list[tuple[float, str, str]] = []
    for number, slo_class in enumerate(recording.classes):
        times, shares = spans.attainment(recording, slo_class)
        colour = CLASS_LINES[number % len(CLASS_LINES)]
        ax.plot(times, shares, color=colour, linestyle=LINE_STYLES[number % len(LINE_STYLES)], linewidth=1.8)
        whole = spans.attained_share(recording, slo_class)
        known = [share for share in shares if not math.isnan(share)]
        if whole is not None and known:
            last.append((known[-1], f"{slo_class} ({_slo(recording, slo_class)}): {whole:.1%} of all", colour))
    at = math.inf
    for share, text, colour in sorted(last, reverse=True):
        at = min(share, at - LABEL_APART)
        ax.annotate(text, (1.0, at), color=colour, **_RIGHT)


def _lanes(recording: Recording) -> tuple[str, ...]:
    return tuple(process for process in recording.processes if process != "server")


def _processes(ax: Axes, recording: Recording, lanes: Sequence[str]) -> None:
    ax.set_label("processes")
    ax.set_title("processes: a gap where one does not serve", loc="left", fontsize=9.5, color=INK, pad=4)
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    for row, process in enumerate(lanes):
        for span in spans.serving_spans(recording, process):
            ax.plot([span.from_s, span.to_s], [row, row], color="#B8C4CC", linewidth=5, solid_capstyle="butt", zorder=2)
    for kill in recording.kills:
        if kill.process not in lanes:
            continue
        row = lanes.index(kill.process)
        ax.scatter([kill.at_s], [row], marker="X", s=70, color=KILL, edgecolor=PAPER, linewidth=0.6, zorder=7)
        again = "not restarted" if kill.up_after_s is None else f"up after {kill.up_after_s:.1f} s"
        if kill.up_after_s is not None:
            ax.scatter([kill.at_s + kill.up_after_s], [row], marker=">", s=34, color="#2E7D32", edgecolor=PAPER, linewidth=0.6, zorder=7)
        others = [other for other in recording.kills if other.process == kill.process]
        text = f"killed holding {kill.held:,}, {again}" if others == [kill] else f"killed {len(others)} times"
        ax.annotate(text, (1.0, row), color=KILL, **_RIGHT)


def _name_kills(ax: Axes, recording: Recording) -> None:
    """Labels above the first axes, each in the lowest free row."""
    ends_s = [-math.inf] * KILL_ROWS
    for kill in recording.kills:
        free = [row for row in range(KILL_ROWS) if ends_s[row] <= kill.at_s]
        row = free[0] if free else KILL_ROWS - 1
        ends_s[row] = kill.at_s + KILL_NAME_SHARE * recording.duration_s
        ax.annotate(
            f"✕ {kill.process}", (kill.at_s, 1.0), xycoords=("data", "axes fraction"), xytext=(-4, 3 + 11 * row),
            textcoords="offset points", ha="left", va="bottom", fontsize=8.5, color=KILL,
        )  # fmt: skip
