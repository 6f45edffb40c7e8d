"""The picture as one HTML file that needs no network: the drawing as SVG, and the data of every moment for the pointer."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Sequence
from importlib.resources import files
from string import Template

import matplotlib as mpl
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from qlm_load.picture import palette
from qlm_load.picture.figure import STYLE
from qlm_load.picture.recording import InstanceFrame, Recording

Table = tuple[str, Sequence[Sequence[str]]]
"""A caption and its rows, the first of them headings."""


def page(figure: Figure, recording: Recording, table: Table | None = None) -> str:
    """The file's content. `table` is shown below the picture."""
    template = Template(files("qlm_load").joinpath("data/picture.html").read_text(encoding="utf-8"))
    # A "<" in a model's name could end the element that holds the data.
    data = json.dumps(page_data(figure, recording), separators=(",", ":")).replace("<", "\\u003c")
    return template.substitute(svg=_svg(figure), data=data, table=_table(*table) if table is not None else "")


def page_data(figure: Figure, recording: Recording) -> dict[str, object]:
    """The data of the page's script. Positions are shares of the picture's width and height, from its top left."""
    boxes = [ax.get_position() for ax in figure.axes]
    classes = list(recording.classes)
    kinds = [(model, slo_class) for model in recording.models for slo_class in classes]
    numbers = {kind: number for number, kind in enumerate(kinds)}
    return {
        "left": boxes[0].x0,
        "right": boxes[0].x1,
        "top": 1.0 - max(box.y1 for box in boxes),
        "bottom": 1.0 - min(box.y0 for box in boxes),
        "duration": max(recording.duration_s, 1.0),
        "scale": recording.time_scale,
        "kinds": [{"name": ", ".join(kind), "colour": to_hex(palette.shade(recording.models, classes, *kind))} for kind in kinds],
        "kills": [{"process": kill.process, "t": kill.at_s, "up": kill.up_after_s} for kill in recording.kills],
        "frames": [
            {
                "t": round(frame.at_s, 2),
                "plan": frame.plan_version,
                "unplaced": frame.unplaced,
                "instances": {name: _instance(seen, numbers) for name, seen in sorted(frame.instances.items())},
            }
            for frame in recording.frames
        ],
    }


def _instance(seen: InstanceFrame, numbers: dict[tuple[str, str], int]) -> dict[str, object]:
    return {
        "up": seen.up,
        "model": seen.model,
        "swap": seen.swapping_to,
        "running": seen.running,
        "kv": round(seen.kv_share, 3),
        "queue": [(numbers[part.model, part.slo_class], part.waiting) for part in seen.queue if (part.model, part.slo_class) in numbers],
    }


def _svg(figure: Figure) -> str:
    """The drawing without the XML prologue, to embed it in a page."""
    written = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


def _table(caption: str, rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    head, *body = rows
    return f"<table><caption>{html.escape(caption)}</caption>{line('th', head)}{''.join(line('td', row) for row in body)}</table>"
