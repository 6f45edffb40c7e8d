"""Learns from the outcomes of predictions: one bias factor and error quantiles by horizon for each kind of time. Pure.

A prediction is outstanding until its time is known. Whether it was beyond one of its quantiles is decided at the earlier of that and the
moment at which the quantile passes: one that still waits then is a miss now. One whose request was cancelled says nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

from qlm_core.profiles.calibration import (
    HORIZONS,
    LEVELS,
    ROWS_MAX,
    CalibratedTime,
    CalibrationKey,
    CalibrationProfile,
    calibration_keys,
    error_scale_s,
    horizon_of,
)
from qlm_core.statistics.distribution import Normal
from qlm_estimator.calibration.bias import CHANGED, SHORT_S, BiasFactor
from qlm_estimator.calibration.conformal import ErrorQuantiles, Weighted
from qlm_estimator.events import Count, Ended
from qlm_estimator.newest_rows import put_newest
from qlm_estimator.predictions import AGE_MAX_S, OUTSTANDING_MAX, Judged, Predicted, PredictedQuantiles

PER_WAIT = 16.0
"""Predictions of a kind that are followed within the time that one of them stands for; of more, those between are left out: they err
alike."""
UNPREDICTED_MAX = 10_000
"""Last ends without a prediction: a short request may end before its gateway reports the prediction, about a second later at most."""
LATE = LEVELS.index(0.9)


@dataclass(slots=True)
class _Row:
    """One kind of time. `followed_s`, `outstanding` [HORIZONS]: when the last followed prediction was made, and how many are."""

    bias: BiasFactor = field(default_factory=BiasFactor)
    errors: dict[int, ErrorQuantiles] = field(default_factory=dict)
    followed_s: list[float] = field(default_factory=lambda: [-math.inf] * HORIZONS)
    outstanding: list[int] = field(default_factory=lambda: [0] * HORIZONS)

    def at(self, horizon: int) -> ErrorQuantiles:
        """Returns the errors of a horizon; a new one begins as a copy of the nearest."""
        if horizon not in self.errors:
            near = min(self.errors, key=lambda each: (abs(each - horizon), each), default=None)
            self.errors[horizon] = ErrorQuantiles() if near is None else deepcopy(self.errors[near])
        return self.errors[horizon]


@dataclass(slots=True)
class _Followed:
    """One time of a prediction, made for an engine believed to be so slow. `rows`: those it is followed for, each with the horizon and its
    weight there; `every`: all, with the time since their last prediction; `missed`: of LEVELS, whether that was learned."""

    predicted: Predicted
    quantiles: PredictedQuantiles
    slowdown: float
    rows: list[tuple[_Row, int, float]] = field(default_factory=list)
    every: list[tuple[_Row, float]] = field(default_factory=list)
    missed: list[bool] = field(default_factory=lambda: [False] * len(LEVELS))
    pulled: bool = False


class Feedback:
    """Rows for waits and completions of (model, GPUs, instance), of (model) and of all. At most ROWS_MAX: the one that was not updated
    for the longest goes first."""

    def __init__(self, *, slowdown_of: Callable[[str, str], float]) -> None:
        """`slowdown_of`: how slow the engine of a model on an instance is believed to be now."""
        self._slowdown_of = slowdown_of
        self._rows: dict[CalibrationKey, _Row] = {(time.value, "", "", 0, ""): _Row() for time in CalibratedTime}
        self._followed: dict[tuple[str, CalibratedTime], _Followed] = {}
        self._unpredicted: dict[str, Ended] = {}

    def restore(self, profiles: Iterable[CalibrationProfile]) -> None:
        """Takes published rows: their factors and quantiles as they were."""
        for profile in profiles:
            of_horizon = [profile.scores[horizon::HORIZONS] for horizon in range(HORIZONS)]
            errors = {horizon: ErrorQuantiles.restored(scores, profile.samples) for horizon, scores in enumerate(of_horizon)}
            row = _Row(BiasFactor.restored(profile.bias_factor, profile.evidence_s, profile.samples), errors)
            put_newest(self._rows, profile.key, row, ROWS_MAX)

    def predict(self, predicted: Predicted) -> Judged | None:
        """A client got this prediction; judged at once where the request has completed already."""
        if len(self._followed) >= OUTSTANDING_MAX:
            return None
        for time, quantiles in ((CalibratedTime.WAIT, predicted.wait), (CalibratedTime.COMPLETION, predicted.completion)):
            if quantiles is not None and quantiles.own.mean >= 0.0:
                self._follow(time, predicted, quantiles)
        ended = self._unpredicted.pop(predicted.queue_id, None)
        return None if ended is None else self.end(ended)

    def _follow(self, time: CalibratedTime, predicted: Predicted, quantiles: PredictedQuantiles) -> None:
        followed = _Followed(predicted, quantiles, self._slowdown_of(predicted.model, predicted.instance))
        wider = _Row()
        for key in reversed(calibration_keys(time, predicted.model, predicted.gpu, predicted.n_gpu, predicted.instance)):
            row = wider = self._rows.get(key) or _Row(replace(wider.bias, last_s=-math.inf), deepcopy(wider.errors))
            put_newest(self._rows, key, row, ROWS_MAX)
            followed.every.append((row, row.bias.apart_s(predicted.at_s)))
            horizon = horizon_of(row.bias.level_s(quantiles.own.mean))
            apart_s = predicted.at_s - row.followed_s[horizon]
            if not 0.0 <= apart_s < quantiles.own.mean / PER_WAIT:
                row.followed_s[horizon] = predicted.at_s
                row.outstanding[horizon] += 1
                followed.rows.append((row, horizon, min(1.0, max(0.0, apart_s) / (quantiles.own.mean + SHORT_S))))
        self._followed[predicted.queue_id, time] = followed

    def pass_time(self, now_s: float) -> bool:
        """Quantiles that passed while the time of their prediction is not over are missed; whether any was. Costs O(outstanding)."""
        learned = False
        for followed in self._followed.values():
            learned |= self._pass(followed, now_s)
        while self._followed and next(iter(self._followed.values())).predicted.at_s < now_s - AGE_MAX_S:
            self._drop(next(iter(self._followed)))
        return learned

    def _pass(self, followed: _Followed, now_s: float) -> bool:
        learned = False
        if followed.rows and not followed.pulled:
            for which, limit_s in enumerate(followed.quantiles.seconds):
                if not followed.missed[which] and followed.predicted.at_s + limit_s < now_s:
                    followed.missed[which] = learned = True
                    self._learn(followed, which, limit_s)
        return learned

    def pulled(self, queue_id: str, at_s: float) -> None:
        """Notes a first pull: its wait ends in a moment, at the start that its completion names."""
        followed = self._followed.get((queue_id, CalibratedTime.WAIT))
        if followed is not None:
            self._pass(followed, at_s)
            followed.pulled = True

    def end(self, ended: Ended) -> Judged | None:
        """A request ended: if it completed, all that was predicted of it is known by now, and else nothing ever will be."""
        wait = self._drop((ended.queue_id, CalibratedTime.WAIT))
        completion = self._drop((ended.queue_id, CalibratedTime.COMPLETION))
        if ended.state is not Count.COMPLETED:
            return None
        if completion is None:
            put_newest(self._unpredicted, ended.queue_id, ended, UNPREDICTED_MAX)
            return None
        if wait is not None and ended.wait_s is not None:
            self._end(wait, ended.wait_s)
        self._end(completion, ended.latency_s)
        return Judged(predicted=completion.predicted, at_s=ended.at_s, completion_s=ended.latency_s, wait_s=ended.wait_s)

    def _end(self, followed: _Followed, actual_s: float) -> None:
        for which, limit_s in enumerate(followed.quantiles.seconds):
            if not followed.missed[which]:
                followed.missed[which] = actual_s > limit_s
                self._learn(followed, which, actual_s)
        for row, horizon, weight in followed.rows:
            row.at(horizon).add(_error(row, followed.quantiles.own, actual_s), weight)
        predicted = followed.predicted
        scale = self._slowdown_of(predicted.model, predicted.instance) / followed.slowdown
        if abs(scale - 1.0) < CHANGED:
            for row, apart_s in followed.every:
                row.bias.add(apart_s, scale * followed.quantiles.own.mean, actual_s)

    def profiles(self, now_s: float) -> tuple[CalibrationProfile, ...]:
        """The rows by key. The errors of those that are beyond their p90 by now count as far as they have come (without them 65% instead of
        72% are within p90 where lengths drift)."""
        late: dict[int, dict[int, list[Weighted]]] = {}
        for followed in self._followed.values():
            if followed.missed[LATE]:
                for row, horizon, weight in followed.rows:
                    error = _error(row, followed.quantiles.own, now_s - followed.predicted.at_s)
                    late.setdefault(id(row), {}).setdefault(horizon, []).append((error, weight))
        return tuple(_profile(key, row, late.get(id(row), {})) for key, row in sorted(self._rows.items(), key=lambda each: each[0]))

    def _learn(self, followed: _Followed, which: int, actual_s: float) -> None:
        for row, horizon, _ in followed.rows:
            outstanding = row.outstanding[horizon]
            row.at(horizon).learn(which, followed.missed[which], _error(row, followed.quantiles.own, actual_s), outstanding)

    def _drop(self, key: tuple[str, CalibratedTime]) -> _Followed | None:
        followed = self._followed.pop(key, None)
        if followed is not None:
            for row, horizon, _ in followed.rows:
                row.outstanding[horizon] -= 1
        return followed


def _error(row: _Row, own: Normal, actual_s: float) -> float:
    mean_s = row.bias.level_s(own.mean)
    return (actual_s - mean_s) / error_scale_s(mean_s, own.variance)


def _profile(key: CalibrationKey, row: _Row, late: Mapping[int, Sequence[Weighted]]) -> CalibrationProfile:
    time, model, gpu, n_gpu, instance = key
    errors = {horizon: row.at(horizon) for horizon in late} | (row.errors or {0: ErrorQuantiles()})
    known = {horizon: each.quantiles(late.get(horizon, ())) for horizon, each in errors.items()}
    by_horizon = [known[min(known, key=lambda each: (abs(each - horizon), each))] for horizon in range(HORIZONS)]
    return CalibrationProfile(
        time=CalibratedTime(time),
        model=model,
        gpu=gpu,
        n_gpu=n_gpu,
        instance=instance,
        bias_factor=row.bias.factor,
        evidence_s=row.bias.evidence_s,
        scores=tuple(each[which] for which in range(len(LEVELS)) for each in by_horizon),
        samples=row.bias.pairs,
    )
