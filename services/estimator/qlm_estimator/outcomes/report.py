"""Outcomes of the requests that ended lately: attainment by SLO class, rates, LSOs, and predictions against what happened. Pure.

Everything is counted by the second in bounded memory.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qlm_core.profiles.calibration import CalibratedTime
from qlm_core.statistics.normal_arrays import Floats
from qlm_core.vocabulary.group import shortest_slo_s
from qlm_estimator.events import Count, Ended
from qlm_estimator.predictions import Judged, PredictedQuantiles, depth_class

WINDOW_MAX_S = 3600.0
"""Longest window of a report."""
CLASSES_MAX = 64
"""SLO classes that are counted apart. An agent names a class."""
OTHER_CLASS = "other"
JUDGED_MAX = 10_000
"""Predictions that are judged."""
R2_SAMPLES_MIN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """See ClassOutcomes in estimator.proto."""

    slo_class: str
    judged: int
    attained: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRow:
    """See CalibrationRow in estimator.proto; `depth` "" stands for any."""

    time: CalibratedTime
    depth: str
    samples: int
    within_p50: float
    within_p90: float
    within_p99: float
    bias_s: float
    r2: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomesReport:
    """The last `window_s` seconds."""

    window_s: float
    counts: Mapping[Count, int]
    classes: tuple[ClassReport, ...]
    calibration: tuple[CalibrationRow, ...]


class Outcomes:
    """From `since_s` on. Events arrive in the order of the stream; all times are seconds of the queue's clock."""

    def __init__(self, since_s: float) -> None:
        self._since_s = since_s
        self._seconds: deque[tuple[int, Counter[tuple[str, str]]]] = deque(maxlen=int(WINDOW_MAX_S) + 1)  # by what and SLO class
        self._classes: set[str] = set()
        self._judged: deque[Judged] = deque(maxlen=JUDGED_MAX)

    def count(self, at_s: float, what: str, by: int = 1, slo_class: str = "") -> None:
        """An event. A time before the last one counts at the last one."""
        second = int(at_s)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, Counter()))
        self._seconds[-1][1][what, slo_class] += by

    def end(self, ended: Ended) -> None:
        self.count(ended.at_s, ended.state)
        self.count(ended.at_s, Count.OUTPUT_TOKENS, ended.output_tokens)
        if ended.slo_class:
            self.count(ended.at_s, ended.outcome, slo_class=ended.slo_class)

    def judge(self, judged: Judged) -> None:
        self._judged.append(judged)

    def class_name(self, claimed: str) -> str:
        """The class that a request counts for: its own ("" for one of no known class), or OTHER_CLASS when there are too many."""
        if claimed and claimed not in self._classes:
            if len(self._classes) >= CLASSES_MAX:
                return OTHER_CLASS
            self._classes.add(claimed)
        return claimed

    def report(self, now_s: float, window_s: float) -> OutcomesReport:
        """Reports at most the last `window_s` (0 to WINDOW_MAX_S)."""
        from_s = max(now_s - min(window_s, WINDOW_MAX_S), self._since_s)
        counts: Counter[tuple[str, str]] = Counter()
        for second, counted in self._seconds:
            if second + 1 > from_s:
                counts.update(counted)
        classes = {slo_class for what, slo_class in counts if slo_class and what != Count.CANCELLED}
        return OutcomesReport(
            window_s=max(0.0, now_s - from_s),
            counts={what: counts[what, ""] for what in Count},
            classes=tuple(_class_report(name, counts) for name in sorted(classes, key=class_order)),
            calibration=self.calibration_since(from_s),
        )

    def calibration_since(self, from_s: float) -> tuple[CalibrationRow, ...]:
        """Reports the predictions judged since then, at most JUDGED_MAX."""
        return calibration_rows([judged for judged in self._judged if judged.at_s >= from_s])


def class_order(name: str) -> tuple[int, float, str]:
    """Seconds first, the shortest first ("1/4s", "32s"); then priorities, lower first; then anything else."""
    number = name.removeprefix("p")
    if name.startswith("p") and number.removeprefix("-").isdigit():
        return (1, float(number), name)
    slo_s = shortest_slo_s(name)
    return (0, slo_s, name) if math.isfinite(slo_s) else (2, 0.0, name)


def _class_report(name: str, counts: Mapping[tuple[str, str], int]) -> ClassReport:
    """One that failed or expired has missed its SLO."""
    attained, missed, unjudged, failed, expired = (
        counts.get((what, name), 0) for what in ("attained", "missed", "unjudged", "failed", "expired")
    )
    lost = 0 if class_order(name)[0] == 1 else failed + expired
    return ClassReport(slo_class=name, judged=attained + missed + lost, attained=attained, completed=attained + missed + unjudged)


def calibration_rows(judged: Sequence[Judged]) -> tuple[CalibrationRow, ...]:
    """Waits and completions over all depths, then those of each depth. No row is empty."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, each in enumerate(judged):
        places[""].append(place)
        places[depth_class(each.predicted.requests_ahead)].append(place)
    waits = np.array([_numbers(each.predicted.wait, each.wait_s) for each in judged])
    completions = np.array([_numbers(each.predicted.completion, each.completion_s) for each in judged])
    return tuple(
        _row(time, depth, known)
        for depth in sorted(places, key=lambda depth: (int(depth.rstrip("+") or "-1"), depth))
        for time, numbers in ((CalibratedTime.WAIT, waits), (CalibratedTime.COMPLETION, completions))
        if len(known := numbers[places[depth]][~np.isnan(numbers[places[depth], 3])])
    )


def _numbers(quantiles: PredictedQuantiles | None, actual_s: float | None) -> tuple[float, ...]:
    """p50, p90, p99 and the actual time, NaN where that is not known."""
    return (math.nan,) * 4 if quantiles is None or actual_s is None else (*quantiles.seconds, actual_s)


def _row(time: CalibratedTime, depth: str, known: Floats) -> CalibrationRow:
    """`known`: shape (samples, 4): p50, p90, p99 and the actual time."""
    actual_s = known[:, 3]
    errors_s = actual_s[:, None] - known[:, :3]
    within = (errors_s <= 0.0).mean(axis=0)
    spread = float(np.square(actual_s - actual_s.mean()).sum())
    explained = len(known) >= R2_SAMPLES_MIN and spread > 0.0
    return CalibrationRow(
        time=time,
        depth=depth,
        samples=len(known),
        within_p50=float(within[0]),
        within_p90=float(within[1]),
        within_p99=float(within[2]),
        bias_s=float(errors_s[:, 0].mean()),
        r2=1.0 - float(np.square(errors_s[:, 0]).sum()) / spread if explained else None,
    )
