"""Calibration of predictions: the remaining bias of their level, and their errors (QLM has neither).

The formulas sum independent requests, so their relative error shrinks with the queue. The real one does not: output lengths drift while
a request waits, and so do engines. A row has a factor on the mean, and quantiles of the errors by horizon, in units of `error_scale_s`.
The factor rests on waits of some length, and says little of ones that are much longer: `level_s`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from qlm_core.statistics.distribution import Normal, normal_quantile
from qlm_core.vocabulary.instance import InstanceFacts

CalibrationKey = tuple[str, str, str, int, str]
"""(time, model, gpu, n_gpu, instance); "" and 0 stand for any."""

ROWS_MAX = 4096
"""Most rows of a snapshot."""

LEVELS = (0.5, 0.9, 0.99)
"""Quantiles that are tracked."""
MEMORY = 10.0
"""Independent waits after which an old one weighs 1 / e."""
HORIZONS = 8
HORIZON_FACTOR = 4.0
"""Predictions below a second are of the first horizon; each further one reaches so many times as far."""
RELATIVE, BASE_S = 0.1, 1.0
"""Errors are in units of the root of the sum of squares of the formulas' own deviation, so much of the mean, and so many seconds."""
PRIOR_SCORE = 3.0
"""Deviation of the errors, in these units, before any is known: 30% of the time and 3 s."""
BIAS_DEVIATION = PRIOR_SCORE * RELATIVE
"""Deviation of a bias factor from 1 before any error is known."""

PRIOR_SCORES = tuple(PRIOR_SCORE * normal_quantile(level) for level in LEVELS for _ in range(HORIZONS))
_Z90 = normal_quantile(0.9)


class CalibratedTime(StrEnum):
    """The predicted time of a row."""

    WAIT = "wait"
    COMPLETION = "completion"


def error_scale_s(mean_s: float, variance: float) -> float:
    """The unit of the errors of predictions with this mean, the bias removed, and this variance by the formulas."""
    return math.sqrt(variance + (RELATIVE * mean_s) ** 2 + BASE_S**2)


def level_s(bias_factor: float, evidence_s: float, mean_s: float) -> float:
    """A mean without its bias. No bias at all weighs as much as one wait, the one to come, and a bias as the waits of that length that
    `evidence_s` holds."""
    waits = evidence_s / (max(mean_s, 0.0) + BASE_S)
    return mean_s * (1.0 + (bias_factor - 1.0) * waits / (waits + 1.0))


def horizon_of(mean_s: float) -> int:
    """The number of the horizon of a predicted time."""
    return min(math.ceil(math.log(max(mean_s, 1.0), HORIZON_FACTOR)), HORIZONS - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationProfile:
    """Calibration of a time that the formulas predict with mean m and variance v, the quantile LEVELS[k] is M + scores[k, horizon of M] *
    error_scale_s(M, v), with M = level_s(`bias_factor`, `evidence_s`, m). `scores` [LEVELS * HORIZONS]. `samples`: independent pairs behind
    the factor (pairs that waited behind the same requests count as one), and `evidence_s`: their seconds, fewer where they scatter more
    than the prior has it. `model` "", `gpu` "" with `n_gpu` 0, `instance` "": any."""

    time: CalibratedTime = CalibratedTime.WAIT
    model: str = ""
    gpu: str = ""
    n_gpu: int = 0
    instance: str = ""
    bias_factor: float = 1.0
    evidence_s: float = 0.0
    scores: tuple[float, ...] = PRIOR_SCORES
    samples: float = 0.0

    def __post_init__(self) -> None:
        sums = math.isfinite(self.samples) and self.samples >= 0.0 and math.isfinite(self.evidence_s) and self.evidence_s >= 0.0
        if not (sums and math.isfinite(self.bias_factor) and self.bias_factor > 0.0):
            raise ValueError(f"calibration {self.key}: samples and evidence_s are finite and >= 0, bias_factor finite and > 0")
        if self.n_gpu < 0 or len(self.scores) != len(LEVELS) * HORIZONS or not all(map(math.isfinite, self.scores)):
            raise ValueError(f"calibration {self.key}: n_gpu >= 0, {len(LEVELS) * HORIZONS} finite scores")

    @property
    def key(self) -> CalibrationKey:
        return (self.time.value, self.model, self.gpu, self.n_gpu, self.instance)

    def applied(self, own: Normal) -> Normal:
        """The normal with the first two quantiles of what a prediction of the formulas stands for."""
        if self is UNCALIBRATED:
            return own
        mean_s = level_s(self.bias_factor, self.evidence_s, own.mean)
        scale_s, horizon = error_scale_s(mean_s, own.variance), horizon_of(mean_s)
        median, high = self.scores[horizon], self.scores[HORIZONS + horizon]
        return Normal(mean_s + median * scale_s, ((high - median) / _Z90 * scale_s) ** 2)

    def p99_s(self, own: Normal) -> float:
        """The last quantile."""
        mean_s = level_s(self.bias_factor, self.evidence_s, own.mean)
        return mean_s + self.scores[2 * HORIZONS + horizon_of(mean_s)] * error_scale_s(mean_s, own.variance)


UNCALIBRATED = CalibrationProfile()
"""Where nothing was learned: the formulas' own word."""


def calibration_keys(time: CalibratedTime, model: str, gpu: str, n_gpu: int, instance: str) -> tuple[CalibrationKey, ...]:
    """The keys of the rows that a prediction may be calibrated by, the narrowest first."""
    return ((time.value, model, gpu, n_gpu, instance), (time.value, model, "", 0, ""), (time.value, "", "", 0, ""))


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
"""The table of a snapshot without rows."""
