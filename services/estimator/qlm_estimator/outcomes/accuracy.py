"""How well predictions came true, by model, GPU and depth. Pure.

Coverage, bias, R2 and pinball loss (Gneiting, "Making and evaluating point forecasts", Journal of the American Statistical Association 106,
2011) of judged predictions, and of sums over their keys.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from qlm_core.normal_arrays import Floats
from qlm_estimator.predictions import Judged, Told, depth_class, gpu_label

KEYS_MAX = 128
"""Keys told apart, those with the most predictions. What names a model and a GPU is what gateways claim."""
OTHER = "other"
"""Model and GPU of all others."""
UNKNOWN = "unknown"
"""Model or GPU of a prediction that does not tell it."""
R2_SAMPLES_MIN = 10

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


def calibration_rows(judged: Sequence[Judged]) -> tuple[CalibrationRow, ...]:
    """Over all keys, over the models and GPUs of each depth, over the depths of each model and GPU, then each key. No row is empty."""
    keys = [_key(each) for each in judged]
    most = {key for key, _ in Counter(keys).most_common(KEYS_MAX)}
    places: dict[Key, list[int]] = defaultdict(list)
    for place, own in enumerate(keys):
        key = own if own in most else (OTHER, OTHER, "")
        for each in {("", "", ""), ("", "", key[2]), (*key[:2], ""), key}:
            places[each].append(place)
    waits = np.array([_numbers(each.predicted.wait, each.wait_s) for each in judged])
    completions = np.array([_numbers(each.predicted.completion, each.completion_s) for each in judged])
    return tuple(
        _row(time, key, known)
        for key in sorted(places, key=_order)
        for time, numbers in ((PredictedTime.WAIT, waits), (PredictedTime.COMPLETION, completions))
        if len(known := numbers[places[key]][~np.isnan(numbers[places[key], 3])])
    )


def _key(judged: Judged) -> Key:
    predicted = judged.predicted
    gpu = gpu_label(predicted.gpu, predicted.n_gpu)
    return (predicted.model or UNKNOWN, gpu or UNKNOWN, depth_class(predicted.requests_ahead))


def _order(key: Key) -> tuple[bool, str, str, int, str]:
    model, gpu, depth = key
    return (bool(model and depth), model, gpu, int(depth.rstrip("+") or "-1"), depth)


def _numbers(told: Told | None, actual_s: float | None) -> tuple[float, float, float, float]:
    """p50, p90, p99 and what came, NaN where that is not known."""
    if told is None or actual_s is None:
        return (math.nan, math.nan, math.nan, math.nan)
    return (told.p50_s, told.p90_s, told.p99_s, actual_s)


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
