"""What predictions lack beyond their own variance: the error of their level, learned from (predicted, actual) pairs (QLM has none).

The formulas sum independent requests, so their relative error shrinks with the queue. The real one does not: output lengths drift while
a request waits, and so do engines. A row says by how much predictions of a model on a GPU are off (`bias_factor`, `offset_s`), and how
their spread splits into a fixed part, a multiple of the formulas' own variance, and a part that grows with the predicted time itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from qlm_core.distribution import Normal
from qlm_core.instance import InstanceFacts
from qlm_core.normal_arrays import Floats

CalibrationKey = tuple[str, str, str, int, str]
"""(time, model, gpu, n_gpu, instance); "" and 0 stand for any."""

ROWS_MAX = 4096
"""Most rows of a snapshot."""

FIGURES = 5
"""Of a row, as `calibrated` takes them."""


class CalibratedTime(StrEnum):
    """Which time a row is for."""

    WAIT = "wait"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationProfile:
    """The time that a prediction with mean m and variance v stands for has mean `bias_factor` * m + `offset_s` = M, and variance
    `base_variance_s2` + `variance_factor` * v + `relative_variance` * M^2. `samples`: independent pairs that it rests on (pairs that waited
    behind the same requests count as one). `model` "", `gpu` "" with `n_gpu` 0, `instance` "": any."""

    time: CalibratedTime = CalibratedTime.WAIT
    model: str = ""
    gpu: str = ""
    n_gpu: int = 0
    instance: str = ""
    bias_factor: float = 1.0
    offset_s: float = 0.0
    variance_factor: float = 1.0
    relative_variance: float = 0.0
    base_variance_s2: float = 0.0
    samples: float = 0.0

    def __post_init__(self) -> None:
        for name in ("variance_factor", "relative_variance", "base_variance_s2", "samples"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"calibration {self.key}: {name} is finite and >= 0, got {value}")
        if not (math.isfinite(self.bias_factor) and self.bias_factor > 0.0 and math.isfinite(self.offset_s)) or self.n_gpu < 0:
            raise ValueError(f"calibration {self.key}: bias_factor is finite and > 0, offset_s finite, n_gpu >= 0")

    @property
    def key(self) -> CalibrationKey:
        return (self.time.value, self.model, self.gpu, self.n_gpu, self.instance)

    @property
    def figures(self) -> Floats:
        """[FIGURES]"""
        return np.array((self.bias_factor, self.variance_factor, self.relative_variance, self.base_variance_s2, self.offset_s))

    def applied(self, own: Normal) -> Normal:
        """What a prediction of the formulas stands for."""
        mean, variance = calibrated(self.figures, np.array(own.mean), np.array(own.variance))
        return Normal(float(mean), float(variance))


def calibrated(figures: Floats, mean: Floats, variance: Floats) -> tuple[Floats, Floats]:
    """Means and variances [..., predictions] by the figures [FIGURES, predictions] of each. A negative mean has no relative part."""
    found = figures[0] * mean + figures[4]
    return found, figures[3] + figures[1] * variance + figures[2] * np.square(np.maximum(found, 0.0))


UNCALIBRATED = CalibrationProfile()
"""Where nothing was learned: the formulas' own word."""


def calibration_keys(time: CalibratedTime, model: str, gpu: str, n_gpu: int, instance: str) -> tuple[CalibrationKey, ...]:
    """The keys of the rows that a prediction may be calibrated by, the narrowest first."""
    return (
        (time.value, model, gpu, n_gpu, instance),
        (time.value, model, gpu, n_gpu, ""),
        (time.value, model, "", 0, ""),
        (time.value, "", "", 0, ""),
    )


@dataclass(frozen=True, slots=True)
class CalibrationTable:
    """Rows by key; lookups cost O(1). Raises ValueError for more than ROWS_MAX rows and for two of the same key."""

    rows: tuple[CalibrationProfile, ...] = ()
    _by_key: Mapping[CalibrationKey, CalibrationProfile] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_key = {row.key: row for row in self.rows}
        if len(self.rows) > ROWS_MAX or len(by_key) != len(self.rows):
            raise ValueError(f"at most {ROWS_MAX} calibration rows, each with its own key, got {len(self.rows)}")
        object.__setattr__(self, "_by_key", by_key)

    def row(self, time: CalibratedTime, model: str, instance: InstanceFacts) -> CalibrationProfile:
        """The narrowest row there is for predictions of a model on an instance; UNCALIBRATED without any."""
        return self.narrowest(calibration_keys(time, model, instance.gpu, instance.n_gpu, instance.name))

    def narrowest(self, keys: Iterable[CalibrationKey]) -> CalibrationProfile:
        """The row of the first key that has one; UNCALIBRATED without any."""
        return next((row for key in keys if (row := self._by_key.get(key)) is not None), UNCALIBRATED)


NOT_CALIBRATED = CalibrationTable()
"""Of a snapshot that holds no row."""
