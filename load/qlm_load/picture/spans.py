"""Converts frames for the drawing: a virtual queue as an image, spans of time, marks, attainment. Pure; times as in the recording."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlm_load.picture.palette import Rgb, shade
from qlm_load.picture.recording import ClusterFrame, InstanceFrame, Recording

COLUMNS_MAX = 2_000
ROWS_MAX = 600
"""Height of a queue's image in pixels; a longer queue has several requests in a row."""
WINDOW_S = 12.0
"""Real seconds over which attainment is averaged."""
ENDED_MIN = 5
"""Least ended requests of a class in the window for a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`label` held from `from_s` to `to_s`."""

    from_s: float
    to_s: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """`count` of an operation by `at_s`."""

    at_s: float
    what: str
    count: int


def queue_image(recording: Recording, instance: str, waiting_max: int) -> NDArray[np.float64]:
    """RGBA rows from the head of the queue (row 0) to `waiting_max`, columns from 0 to the end of the run; empty is transparent."""
    columns = int(min(COLUMNS_MAX, max(1, len(recording.frames))))
    rows = int(min(ROWS_MAX, max(1, waiting_max)))
    image = np.zeros((rows, columns, 4))
    classes = list(recording.classes)
    colours: dict[tuple[str, str], Rgb] = {}
    times = [frame.at_s for frame in recording.frames]
    middles = (np.arange(rows) + 0.5) * waiting_max / rows
    for column in range(columns):
        at_s = (column + 0.5) * recording.duration_s / columns
        frame = recording.frames[max(0, bisect_right(times, at_s) - 1)]
        seen = frame.instances.get(instance)
        reached = 0
        for part in seen.queue if seen is not None else ():
            kind = (part.model, part.slo_class)
            colours.setdefault(kind, shade(recording.models, classes, *kind))
            image[(middles >= reached) & (middles < reached + part.waiting), column] = (*colours[kind], 1.0)
            reached += part.waiting
    return image


def waiting_max(recording: Recording) -> int:
    """The greatest length of any virtual queue; at least 1."""
    lengths = [sum(part.waiting for part in seen.queue) for frame in recording.frames for seen in frame.instances.values()]
    return max([1, *lengths])


def model_spans(recording: Recording, instance: str) -> list[Span]:
    """The active model over time; "" while the agent was away or had none."""
    return _spans(recording, lambda frame: _of(frame, instance, lambda seen: "" if seen.swapping_to else seen.model))


def model_swap_spans(recording: Recording, instance: str) -> list[Span]:
    """Model swaps, by their new model."""
    return [span for span in _spans(recording, lambda frame: _of(frame, instance, lambda seen: seen.swapping_to)) if span.label]


def down_spans(recording: Recording, instance: str) -> list[Span]:
    return [
        span
        for span in _spans(recording, lambda frame: "" if _of(frame, instance, lambda seen: "up" if seen.up else "") else "down")
        if span.label
    ]


def serving_spans(recording: Recording, process: str) -> list[Span]:
    return [span for span in _spans(recording, lambda frame: process if process in frame.serving else "") if span.label]


def operation_marks(recording: Recording, instance: str) -> list[Mark]:
    """Where counters of the agent grew. One that is smaller than before began anew."""
    marks: list[Mark] = []
    before: dict[str, int] = {}
    for frame in recording.frames:
        seen = frame.instances.get(instance)
        if seen is None or seen.operations is None:
            continue
        for what, now in seen.operations.items():
            grown = now - before.get(what, 0) if now >= before.get(what, 0) else now
            if grown:
                marks.append(Mark(at_s=frame.at_s, what=what, count=grown))
        before = dict(seen.operations)
    return marks


def operation_counts(recording: Recording, instance: str) -> dict[str, int]:
    """Total of each operation, by the agent's counters."""
    counts: dict[str, int] = {}
    for mark in operation_marks(recording, instance):
        counts[mark.what] = counts.get(mark.what, 0) + mark.count
    return counts


def unplaced(recording: Recording) -> tuple[list[float], list[int]]:
    """Times and requests that no planner had placed yet."""
    known = [(frame.at_s, frame.unplaced) for frame in recording.frames if frame.unplaced is not None]
    return [at_s for at_s, _ in known], [count for _, count in known]


def attainment(recording: Recording, slo_class: str) -> tuple[list[float], list[float]]:
    """Times, and the share attained among the class's requests that ended in the WINDOW_S before; NaN where too few did."""
    ends = sorted((end.at_s, end.attained) for end in recording.ends if end.slo_class == slo_class)
    times = [at_s for at_s, _ in ends]
    attained = np.concatenate([[0], np.cumsum([attained for _, attained in ends])])
    points = np.arange(0.0, recording.duration_s + 0.5, 0.5)
    shares = []
    for point in points:
        low, high = bisect_right(times, point - WINDOW_S), bisect_right(times, point)
        shares.append(float((attained[high] - attained[low]) / (high - low)) if high - low >= ENDED_MIN else float("nan"))
    return points.tolist(), shares


def attained_share(recording: Recording, slo_class: str) -> float | None:
    """Over the whole run; None where none ended."""
    ends = [end.attained for end in recording.ends if end.slo_class == slo_class]
    return sum(ends) / len(ends) if ends else None


def _of(frame: ClusterFrame, instance: str, what: Callable[[InstanceFrame], str]) -> str:
    seen = frame.instances.get(instance)
    return "" if seen is None else what(seen)


def _spans(recording: Recording, label: Callable[[ClusterFrame], str]) -> list[Span]:
    """Frames with the same label in a row; each frame holds until the next."""
    spans: list[Span] = []
    frames: Sequence[ClusterFrame] = recording.frames
    for frame, after in zip(frames, [*frames[1:], frames[-1:][0]] if frames else [], strict=True):
        now = label(frame)
        if spans and spans[-1].label == now:
            spans[-1] = Span(from_s=spans[-1].from_s, to_s=after.at_s, label=now)
        else:
            spans.append(Span(from_s=frame.at_s, to_s=after.at_s, label=now))
    return spans
