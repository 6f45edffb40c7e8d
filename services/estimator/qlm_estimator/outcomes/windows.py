"""How well predictions come true, by model, GPU and depth, over the last of them. Pure.

Each key keeps its last `SAMPLES_MAX` judged predictions in an array that grows as they come, so that the figures of any window of time and
of any sum of keys come from the same numbers: coverage, bias, R2 and pinball loss (Gneiting, "Making and evaluating point forecasts",
Journal of the American Statistical Association 106, 2011).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from qlm_estimator.predictions import Judged, Told, depth_class, gpu_label

Floats = NDArray[np.float64]

SAMPLES_MAX = 2_048
"""Judged predictions that a key keeps; the oldest go first."""
SAMPLES_FIRST = 32
"""Room of a key that is new."""
KEYS_MAX = 128
"""Keys told apart: 128 of 2,048 samples of 9 numbers are 19 MB. What names a model and a GPU is what gateways claim."""
OTHER = "other"
"""Model and GPU of what comes beyond `KEYS_MAX`."""
UNKNOWN = "unknown"
"""Model or GPU of a prediction that does not tell it."""
R2_SAMPLES_MIN = 10

_AT, _WAIT, _COMPLETION, _COLUMNS = 0, 1, 5, 9
"""Columns: the time, then p50, p90, p99 and what came for each of wait (NaN where unknown) and completion."""

Key = tuple[str, str, str]
"""(model, GPU, depth class); "" stands for any."""


class PredictedTime(StrEnum):
    """See estimator.proto."""

    WAIT = "wait"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRow:
    """See CalibrationRow in estimator.proto; "" stands for any."""

    time: PredictedTime
    model: str
    gpu: str
    depth: str
    samples: int
    within_p50: float
    within_p90: float
    within_p99: float
    bias_s: float
    r2: float | None
    pinball_p50_s: float
    pinball_p90_s: float
    pinball_p99_s: float
    actual_mean_s: float


class CalibrationWindows:
    """The last judged predictions of each key."""

    def __init__(self) -> None:
        self._windows: dict[Key, _Window] = {}

    def add(self, judged: Judged) -> None:
        """Beyond `KEYS_MAX` keys, a new model or GPU counts as `OTHER`."""
        predicted = judged.predicted
        gpu = gpu_label(predicted.gpu, predicted.n_gpu)
        key = (predicted.model or UNKNOWN, gpu or UNKNOWN, depth_class(predicted.requests_ahead))
        window = self._windows.get(key)
        if window is None and len(self._windows) >= KEYS_MAX:
            key = (OTHER, OTHER, "")
            window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window()
        wait = predicted.wait if judged.wait_s is not None else None
        window.add((judged.at_s, *_numbers(wait, judged.wait_s), *_numbers(predicted.completion, judged.completion_s)))

    def rows(self, from_s: float = -math.inf) -> tuple[CalibrationRow, ...]:
        """Of the predictions judged from `from_s` on: over all keys, over the models and GPUs of each depth, over the depths of each model
        and GPU, then each key. No row is empty. Costs O(samples)."""
        kept = {key: window.since(from_s) for key, window in sorted(self._windows.items())}
        return tuple(row for key, samples in _with_sums(kept) for row in _rows(key, samples))


class _Window:
    """A ring of samples. Times may go back: what is old is told by its time, not by its place."""

    def __init__(self) -> None:
        self._ring: Floats = np.empty((SAMPLES_FIRST, _COLUMNS))
        self._count = 0
        self._next = 0

    def add(self, sample: tuple[float, ...]) -> None:
        if self._count == len(self._ring) < SAMPLES_MAX:
            self._ring = np.concatenate((self._ring, np.empty((min(len(self._ring), SAMPLES_MAX - len(self._ring)), _COLUMNS))))
            self._next = self._count
        self._ring[self._next] = sample
        self._count = max(self._count, self._next + 1)
        self._next = (self._next + 1) % len(self._ring)

    def since(self, from_s: float) -> Floats:
        """Shape (samples, 9)."""
        filled = self._ring[: self._count]
        return filled[filled[:, _AT] >= from_s]


def _numbers(told: Told | None, actual_s: float | None) -> tuple[float, float, float, float]:
    if told is None or actual_s is None:
        return (math.nan, math.nan, math.nan, math.nan)
    return (told.p50_s, told.p90_s, told.p99_s, actual_s)


def _with_sums(kept: dict[Key, Floats]) -> Iterator[tuple[Key, Floats]]:
    sums: dict[Key, list[Floats]] = defaultdict(list)
    for (model, gpu, depth), samples in kept.items():
        for key in {("", "", ""), ("", "", depth), (model, gpu, "")}:
            sums[key].append(samples)
    for key in sorted(sums.keys() - kept.keys(), key=lambda key: (key != ("", "", ""), key[:2], _depth_order(key[2]))):
        yield key, np.concatenate(sums[key])
    yield from kept.items()


def _depth_order(depth: str) -> tuple[int, str]:
    return (int(depth.rstrip("+") or "-1"), depth)


def _rows(key: Key, samples: Floats) -> Iterator[CalibrationRow]:
    for time, first in ((PredictedTime.WAIT, _WAIT), (PredictedTime.COMPLETION, _COMPLETION)):
        known = samples[~np.isnan(samples[:, first]), first : first + 4]
        if len(known):
            yield _row(time, key, known)


def _row(time: PredictedTime, key: Key, known: Floats) -> CalibrationRow:
    """`known`: shape (samples, 4): p50, p90, p99 and what came."""
    actual_s = known[:, 3]
    errors_s = actual_s[:, None] - known[:, :3]
    levels = np.array((0.5, 0.9, 0.99))
    within = (errors_s <= 0.0).mean(axis=0)
    pinball_s = np.maximum(levels * errors_s, (levels - 1.0) * errors_s).mean(axis=0)
    spread = float(np.square(actual_s - actual_s.mean()).sum())
    explained = len(known) >= R2_SAMPLES_MIN and spread > 0.0
    return CalibrationRow(
        time=time,
        model=key[0],
        gpu=key[1],
        depth=key[2],
        samples=len(known),
        within_p50=float(within[0]),
        within_p90=float(within[1]),
        within_p99=float(within[2]),
        bias_s=float(errors_s[:, 0].mean()),
        r2=1.0 - float(np.square(errors_s[:, 0]).sum()) / spread if explained else None,
        pinball_p50_s=float(pinball_s[0]),
        pinball_p90_s=float(pinball_s[1]),
        pinball_p99_s=float(pinball_s[2]),
        actual_mean_s=float(actual_s.mean()),
    )
