"""The picture of device maps: where the time of a token goes, and how full each device is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qlm_deploy.plan import Plan

PNG_DPI = 130
HOPS_COLOUR = "0.35"


def write_picture(plans: Sequence[Plan], path: Path) -> None:
    """A row for each plan: its stages as bars of milliseconds a token, with the hops behind them, and the GiB of each stage in its device's
    usable memory. A device has one colour in all rows."""
    devices = list(dict.fromkeys(stage.device for plan in plans for stage in plan.stages))
    colours = {device: mpl.colormaps["tab20"](place % 20) for place, device in enumerate(devices)}
    bars = [(plan, stage) for plan in plans for stage in plan.stages]
    with mpl.rc_context({"font.size": 8.0, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11.0, max(2.4, 1.2 + 0.28 * max(len(plans), len(bars)))), layout="constrained")
        FigureCanvasAgg(figure)
        times, memory = figure.subplots(1, 2)
        for row, plan in enumerate(plans):
            left = 0.0
            for stage in plan.stages:
                times.barh(row, stage.compute_ms, left=left, color=colours[stage.device], edgecolor="white")
                times.text(left + stage.compute_ms / 2, row, f"{stage.device}\n{stage.layers}", ha="center", va="center", fontsize=6)
                left += stage.compute_ms
            times.barh(row, plan.hops_ms, left=left, color=HOPS_COLOUR)
        times.set_yticks(range(len(plans)), [plan.deployer for plan in plans])
        times.invert_yaxis()
        times.set_xlabel("ms a token: device and layers of each stage, then hops (grey)")
        times.set_title(plans[0].model)
        places = range(len(bars))
        memory.barh(places, [stage.usable_gib for _, stage in bars], color="0.9")
        memory.barh(places, [stage.memory_gib for _, stage in bars], color=[colours[stage.device] for _, stage in bars])
        memory.set_yticks(places, [f"{plan.deployer} {stage.device}" for plan, stage in bars])
        memory.invert_yaxis()
        memory.set_xlabel("GiB of weights and KV, in usable memory (grey)")
        figure.savefig(path, dpi=PNG_DPI)
