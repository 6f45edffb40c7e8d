"""Learns how far predictions are off, from what clients were told and what came: bias and spread for `qlm_core.calibration`. Pure.

Bias: a line through what came over what the formulas said, weighted by the spread, which leans on no bias at all (a regression with a
normal prior): a factor, and an offset for what does not grow with the queue. Spread: the squared errors
are split into a fixed part, a multiple of the formulas' own variance and a part in proportion to the squared mean, each in the share that
it has by now (one step of expectation maximisation for variance components, Dempster, Laird and Rubin, JRSS B 1977, a pair at a time).

Requests that waited behind the same ones err alike, so pairs count by time: a pair that was told sooner after the one before it than it
then had to wait is only so much of a new one. Errors beyond OUTLIER_DEVIATIONS count as that many. Where the engine or the workload changed
so much meanwhile that today's prediction would be another one, the pair tells of the change and not of the spread, and is left out, with
its time: the first pair after a change, told while that was being learned, would else count for the whole of it.

A spread that rests on few independent errors is itself uncertain: what is published is wider, as Student's t is than the normal.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field, replace

from qlm_core.calibration import CalibratedTime, CalibrationKey, CalibrationProfile, calibration_keys
from qlm_core.distribution import Normal, normal_quantile
from qlm_estimator.predictions import Judged, Predicted, Told

MEMORY = 40.0
"""Independent pairs of a row after which an old one weighs 1 / e."""
PRIOR_PAIRS = 2.0
"""What a row begins with weighs as much as so many independent pairs: in its spread, and in how sure that is."""
PRIOR_FACTOR_DEVIATION = 0.015
PRIOR_OFFSET_DEVIATION_S = 2.0
"""Standard deviations that the bias factor and the offset are believed to have before any pair."""
PRIOR_RELATIVE_VARIANCE = 0.026**2
"""Requests that wait together have a part of their error in common: by how much outputs change meanwhile. Its deviation is believed to be
2.6% of the time before any pair."""
ALONE_SHARE = 0.32
"""Waits on an instance that serves one model by itself begin with so much of that variance (1.5% of the time): no run of another model is
ahead of them, which grows while they wait and whose outputs drift by themselves."""
PRIOR_BASE_VARIANCE_S2 = 1.0
CORRELATED_MIN_S = 5.0
"""Pairs told within this time are one at the most."""
OUTLIER_DEVIATIONS = 3.0
CHANGED_LOG = 0.3
"""Logarithm of the change of a request's work by which predictions from before it are no longer what would be said now."""
BIAS_MIN, BIAS_MAX = 0.5, 2.0
OFFSET_MAX_S = 600.0
FACTOR_MIN, FACTOR_MAX = 0.1, 100.0
RELATIVE_MIN, RELATIVE_MAX = 1e-6, 1.0
BASE_MIN_S2, BASE_MAX_S2 = 1e-4, 1e6
RECENT_S = 200.0
SURPRISE_ERROR_MAX = 16.0
SURPRISE_MAX = 5.0
"""Where the squared errors of the last predictions, those told within about RECENT_S, are larger than the spread says, the spread that is
published is larger by as much, at most SURPRISE_MAX times; one of them counts SURPRISE_ERROR_MAX times its due at the most."""
SHARE_MIN = 1e-9
"""A variance or squared mean below it, in seconds squared, says nothing of its part."""
LEVELS_MAX = 4_096
LEVEL_EVERY_S = 10.0
"""A request's work is kept at most so often and so many times, for each model and instance."""


@dataclass(slots=True)
class _Line:
    """a + b x through weighted points, leaning on a = `prior_offset`, b = `prior_factor`: sums of the normal equations."""

    prior_factor: float = 1.0
    prior_offset: float = 0.0
    ones: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, weight: float, kept: float) -> None:
        """A point; those before it fade to `kept` of their weight."""
        self.ones = kept * self.ones + weight
        self.x = kept * self.x + weight * x
        self.xx = kept * self.xx + weight * x * x
        self.y = kept * self.y + weight * y
        self.xy = kept * self.xy + weight * x * y

    @property
    def fit(self) -> tuple[float, float]:
        """Factor and offset."""
        for_factor, for_offset = PRIOR_FACTOR_DEVIATION**-2, PRIOR_OFFSET_DEVIATION_S**-2
        ones, xx = self.ones + for_offset, self.xx + for_factor
        y, xy = self.y + for_offset * self.prior_offset, self.xy + for_factor * self.prior_factor
        scale = ones * xx - self.x * self.x
        factor = (ones * xy - self.x * y) / scale
        factor = min(max(factor, BIAS_MIN), BIAS_MAX)
        return factor, min(max((y - factor * self.x) / ones, -OFFSET_MAX_S), OFFSET_MAX_S)


@dataclass(slots=True)
class _Row:
    """`pairs`: independent ones, faded. `surprise`: squared errors of the last ones over what the spread says."""

    line: _Line = field(default_factory=_Line)
    base_variance_s2: float = PRIOR_BASE_VARIANCE_S2
    variance_factor: float = 1.0
    relative_variance: float = PRIOR_RELATIVE_VARIANCE
    pairs: float = 0.0
    surprise: float = 1.0
    last_s: float = -math.inf

    def add(self, at_s: float, own: Normal, actual_s: float) -> None:
        """A pair told at `at_s`."""
        passed_s = max(0.0, at_s - self.last_s)
        share = min(1.0, passed_s / max(CORRELATED_MIN_S, own.mean))
        self.last_s = max(self.last_s, at_s)
        if share <= 0.0:
            return
        kept = 1.0 - share / MEMORY
        factor, offset = self.line.fit
        said = factor * own.mean + offset
        mean = max(0.0, said)
        parts = (self.base_variance_s2, self.variance_factor * own.variance, self.relative_variance * mean * mean)
        total = sum(parts)
        seen = min((actual_s - said) ** 2 / total, SURPRISE_ERROR_MAX)
        self.surprise += (seen - self.surprise) * min(1.0, passed_s / RECENT_S)
        most = OUTLIER_DEVIATIONS * math.sqrt(total)
        error = min(max(actual_s - said, -most), most)
        self.line.add(own.mean, said + error, share / total, kept)
        self.pairs = kept * self.pairs + share
        rate = share / (self.pairs + PRIOR_PAIRS)
        # What each part is expected to have contributed to this error.
        base, own_part, relative = ((part / total) ** 2 * error * error + part * (1.0 - part / total) for part in parts)
        self.base_variance_s2 = _moved(self.base_variance_s2, base, rate, BASE_MIN_S2, BASE_MAX_S2)
        if own.variance > SHARE_MIN:
            self.variance_factor = _moved(self.variance_factor, own_part / own.variance, rate, FACTOR_MIN, FACTOR_MAX)
        if mean * mean > SHARE_MIN:
            self.relative_variance = _moved(self.relative_variance, relative / (mean * mean), rate, RELATIVE_MIN, RELATIVE_MAX)

    def leave_out(self, at_s: float) -> None:
        """A pair told at `at_s` tells nothing, and no later one counts for its time."""
        self.last_s = max(self.last_s, at_s)

    def narrowed(self, relative_share: float) -> _Row:
        """What a narrower row begins with, with so much of the variance that grows with the time."""
        factor, offset = self.line.fit
        return _Row(
            line=_Line(prior_factor=factor, prior_offset=offset),
            base_variance_s2=self.base_variance_s2,
            variance_factor=self.variance_factor,
            relative_variance=max(relative_share * self.relative_variance, RELATIVE_MIN),
        )


def few_pairs_variance(pairs: float) -> float:
    """By how much the variance of a normal is to be larger, so that its p90 is that of Student's t with the degrees of freedom of so many
    independent pairs and the prior. By the expansion of the t quantile around the normal's (Abramowitz and Stegun 26.7.5)."""
    z, degrees = normal_quantile(0.9), pairs + PRIOR_PAIRS
    first = (z**2 + 1.0) / 4.0
    second = (5.0 * z**4 + 16.0 * z**2 + 3.0) / 96.0
    third = (3.0 * z**6 + 19.0 * z**4 + 17.0 * z**2 - 15.0) / 384.0
    return (1.0 + first / degrees + second / degrees**2 + third / degrees**3) ** 2


def _moved(value: float, seen: float, rate: float, low: float, high: float) -> float:
    return min(max(value + rate * (seen - value), low), high)


@dataclass(slots=True)
class _Levels:
    """Seconds of work of a usual request, over time."""

    at_s: deque[float] = field(default_factory=lambda: deque(maxlen=LEVELS_MAX))
    level_s: deque[float] = field(default_factory=lambda: deque(maxlen=LEVELS_MAX))

    def note(self, at_s: float, level_s: float) -> None:
        while self.at_s and self.at_s[-1] > at_s:  # the clock was set back: what it showed beyond this was never
            self.at_s.pop()
            self.level_s.pop()
        if not self.at_s or at_s - self.at_s[-1] >= LEVEL_EVERY_S:
            self.at_s.append(at_s)
            self.level_s.append(level_s)

    def changed(self, since_s: float) -> bool:
        """Whether it is another now than it was then; what was before the first is not known."""
        if not self.at_s:
            return False
        then = self.level_s[max(0, bisect_right(self.at_s, since_s) - 1)]
        return abs(math.log(self.level_s[-1] / then)) > CHANGED_LOG


class Calibrator:
    """Rows for waits and completions of (model, GPUs, instance), (model, GPUs), (model) and all. At most `rows_max`: the one that was not
    updated for the longest goes first."""

    def __init__(self, *, rows_max: int) -> None:
        self._rows_max = rows_max
        self._rows: dict[CalibrationKey, _Row] = {}
        self._levels: dict[tuple[str, str], _Levels] = {}

    def restore(self, profiles: tuple[CalibrationProfile, ...]) -> None:
        """Takes published rows as the state."""
        for profile in profiles[: self._rows_max]:
            pairs = min(profile.samples, MEMORY)
            wider = few_pairs_variance(pairs)
            self._rows[profile.key] = _Row(
                line=_Line(prior_factor=profile.bias_factor, prior_offset=profile.offset_s),
                base_variance_s2=min(max(profile.base_variance_s2 / wider, BASE_MIN_S2), BASE_MAX_S2),
                variance_factor=min(max(profile.variance_factor / wider, FACTOR_MIN), FACTOR_MAX),
                relative_variance=min(max(profile.relative_variance / wider, RELATIVE_MIN), RELATIVE_MAX),
                pairs=pairs,
            )

    def note_work(self, at_s: float, model: str, instance: str, work_s: float) -> None:
        """What a usual request of a model is believed to cost an instance now, in seconds > 0."""
        levels = self._levels.get((model, instance))
        if levels is None:
            while len(self._levels) >= self._rows_max:
                del self._levels[next(iter(self._levels))]
            levels = self._levels[(model, instance)] = _Levels()
        levels.note(at_s, work_s)

    def add(self, judged: Judged, *, alone: bool = False) -> bool:
        """A prediction and what came, on an instance that serves one model by itself (`alone`) or more; False where it tells nothing."""
        predicted = judged.predicted
        levels = self._levels.get((predicted.model, predicted.instance))
        if levels is not None and levels.changed(predicted.at_s):
            self._leave_out(predicted)
            return False
        added = self._add(CalibratedTime.COMPLETION, judged, predicted.completion, judged.completion_s, 1.0)
        if predicted.wait is not None and judged.wait_s is not None:
            share = ALONE_SHARE if alone else 1.0
            added = self._add(CalibratedTime.WAIT, judged, predicted.wait, judged.wait_s, share) or added
        return added

    def _leave_out(self, predicted: Predicted) -> None:
        """For the rows of its instance: wider ones have pairs of other instances too, which tell of that time."""
        for time in CalibratedTime:
            row = self._rows.get(calibration_keys(time, predicted.model, predicted.gpu, predicted.n_gpu, predicted.instance)[0])
            if row is not None:
                row.leave_out(predicted.at_s)

    def _add(self, time: CalibratedTime, judged: Judged, told: Told, actual_s: float, share: float) -> bool:
        """`share`: of the variance that grows with the time, for the row of an instance that is new."""
        own, predicted = told.own, judged.predicted
        if not (math.isfinite(actual_s) and actual_s >= 0.0 and math.isfinite(predicted.at_s) and own.mean >= 0.0):
            return False
        wider: _Row | None = None
        keys = calibration_keys(time, predicted.model, predicted.gpu, predicted.n_gpu, predicted.instance)
        for key in reversed(tuple(dict.fromkeys(keys))):
            row = self._rows.pop(key, None)
            if row is None:
                row = _Row() if wider is None else wider.narrowed(share if key[-1] else 1.0)
            row.add(predicted.at_s, own, actual_s)
            self._rows[key] = row  # the last in order is the newest
            wider = row
        while len(self._rows) > self._rows_max:
            del self._rows[next(iter(self._rows))]
        return True

    def profiles(self) -> tuple[CalibrationProfile, ...]:
        """The rows by key."""
        return tuple(_profile(key, row) for key, row in sorted(self._rows.items(), key=lambda each: each[0]))


def _profile(key: CalibrationKey, row: _Row) -> CalibrationProfile:
    time, model, gpu, n_gpu, instance = key
    made = CalibrationProfile(time=CalibratedTime(time), model=model, gpu=gpu, n_gpu=n_gpu, instance=instance)
    factor, offset = row.line.fit
    wider = min(max(1.0, row.surprise), SURPRISE_MAX) * few_pairs_variance(row.pairs)
    return replace(
        made,
        bias_factor=factor,
        offset_s=offset,
        variance_factor=wider * row.variance_factor,
        relative_variance=wider * row.relative_variance,
        base_variance_s2=wider * row.base_variance_s2,
        samples=row.pairs,
    )
