"""What came of the requests that ended lately: attainment by SLO class, rates, LSOs, and predictions against what happened. Pure.

Counters are kept by the second, single requests in bounded memory: an answer may be for less time than was asked, and says for how much.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from qlm_estimator.outcomes.accuracy import CalibrationRow, calibration_rows
from qlm_estimator.predictions import Judged, Predicted

Value = TypeVar("Value")

WINDOW_MAX_S = 3600.0
"""Longest time that is looked back."""
ENDS_MAX = 50_000
"""Ended requests that are remembered; with more in the window, the answer is for less time."""
CLASSES_MAX = 64
"""SLO classes told apart. What names a class is what an agent claims."""
OTHER_CLASS = "other"
PREDICTIONS_MAX = 10_000
"""Predictions whose requests have not ended, and predictions that are judged."""
PREDICTION_AGE_MAX_S = 6 * 3600.0
"""A prediction this old gives its place to a new one: the end of its request was missed, or nobody waits for it."""
UNPREDICTED_MAX = 10_000
"""Last ends without a prediction: a short request may end before its gateway tells what it predicted, about a second later at most."""


class Count(StrEnum):
    """What is counted by the second."""

    ACCEPTED = "accepted"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    OUTPUT_TOKENS = "output_tokens"
    PULLED = "pulled"
    UNPULLED = "unpulled"
    EVICTED = "evicted"
    RECOVERED = "recovered"
    KV_OFFLOADED = "kv_offloaded"
    KV_RESTORED = "kv_restored"
    MODELS_SWAPPED = "models_swapped"
    MODELS_WARMED = "models_warmed"
    GROUPS_MOVED = "groups_moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that ended as `state`, COMPLETED, FAILED, CANCELLED or EXPIRED. `latency_s`: acceptance to end; `slack_s`: seconds left
    of its SLO when that was met, negative where it was missed, None where it cannot be judged; `wait_s`: acceptance to the first start,
    None where that is not known."""

    queue_id: str
    at_s: float
    state: Count
    slo_class: str
    latency_s: float
    slack_s: float | None = None
    wait_s: float | None = None
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """See ClassOutcomes in estimator.proto."""

    slo_class: str
    judged: int
    attained: int
    completed: int
    latency_p50_s: float
    latency_p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """See Calibration in estimator.proto."""

    samples: int
    within_p50: float
    within_p90: float
    error_p50_s: float
    error_p90_s: float
    bias_s: float
    rows: tuple[CalibrationRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomesReport:
    """The last `window_s` seconds."""

    window_s: float
    counts: Mapping[Count, int]
    classes: tuple[ClassReport, ...]
    calibration: CalibrationReport


class Outcomes:
    """From `since_s` on. Events come in the order of the stream; all times are seconds of the queue's clock."""

    def __init__(self, since_s: float) -> None:
        self._since_s = since_s
        self._seconds: deque[tuple[int, Counter[Count]]] = deque(maxlen=int(WINDOW_MAX_S) + 1)
        self._ends: deque[Ended] = deque()
        self._classes: set[str] = set()
        self._predictions: OrderedDict[str, Predicted] = OrderedDict()
        self._unpredicted: OrderedDict[str, Ended] = OrderedDict()
        self._judged: deque[Judged] = deque(maxlen=PREDICTIONS_MAX)

    def count(self, at_s: float, what: Count, by: int = 1) -> None:
        """Something happened. A time before the last one counts at the last one."""
        second = int(at_s)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, Counter()))
        self._seconds[-1][1][what] += by

    def end(self, ended: Ended) -> Judged | None:
        """A request ended; its judged prediction, if that is known."""
        self.count(ended.at_s, ended.state)
        self.count(ended.at_s, Count.OUTPUT_TOKENS, ended.output_tokens)
        if len(self._ends) >= ENDS_MAX:
            self._since_s = max(self._since_s, self._ends.popleft().at_s)
        self._ends.append(ended)
        predicted = self._predictions.pop(ended.queue_id, None)
        if ended.state is not Count.COMPLETED:
            return None
        if predicted is not None:
            return self._judge(predicted, ended)
        _remember(self._unpredicted, ended.queue_id, ended, UNPREDICTED_MAX)
        return None

    def predict(self, predicted: Predicted) -> Judged | None:
        """A client was told this; judged at once where the request has ended already. Where there is no room a new prediction is left out
        rather than an old one: the longest waits would never be judged."""
        ended = self._unpredicted.pop(predicted.queue_id, None)
        if ended is not None:
            return self._judge(predicted, ended)
        while self._predictions and next(iter(self._predictions.values())).at_s < predicted.at_s - PREDICTION_AGE_MAX_S:
            self._predictions.popitem(last=False)
        if len(self._predictions) < PREDICTIONS_MAX:
            self._predictions[predicted.queue_id] = predicted
        return None

    def class_name(self, claimed: str) -> str:
        """The class that a request counts for: its own ("" for one of no known class), or OTHER_CLASS when there are too many."""
        if claimed and claimed not in self._classes:
            if len(self._classes) >= CLASSES_MAX:
                return OTHER_CLASS
            self._classes.add(claimed)
        return claimed

    def report(self, now_s: float, window_s: float) -> OutcomesReport:
        """Of at most `window_s` (0 to WINDOW_MAX_S) up to now."""
        from_s = max(now_s - min(window_s, WINDOW_MAX_S), self._since_s)
        counts: Counter[Count] = Counter()
        for second, counted in self._seconds:
            if second + 1 > from_s:
                counts.update(counted)
        classes: dict[str, list[Ended]] = defaultdict(list)
        for ended in self._ends:
            if ended.at_s >= from_s and ended.slo_class and ended.state is not Count.CANCELLED:
                classes[ended.slo_class].append(ended)
        return OutcomesReport(
            window_s=max(0.0, now_s - from_s),
            counts={what: counts[what] for what in Count},
            classes=tuple(_class_report(name, classes[name]) for name in sorted(classes, key=class_order)),
            calibration=_calibration(self.judged_since(from_s)),
        )

    def judged_since(self, from_s: float) -> list[Judged]:
        """Predictions that were judged from then on, PREDICTIONS_MAX at the most."""
        return [judged for judged in self._judged if judged.at_s >= from_s]

    def _judge(self, predicted: Predicted, ended: Ended) -> Judged:
        judged = Judged(predicted=predicted, at_s=ended.at_s, completion_s=ended.latency_s, wait_s=ended.wait_s)
        self._judged.append(judged)
        return judged


@dataclass(slots=True, kw_only=True)
class OutcomesOfTerm:
    """What the leader's loop keeps and the service tells; None on a standby."""

    current: Outcomes | None = None


def class_order(name: str) -> tuple[int, float, str]:
    """Seconds first, the shortest first ("1/4s", "32s"); then priorities, lower first; then anything else."""
    if name.endswith("s"):
        top, _, bottom = name[:-1].partition("/")
        if top.isdigit() and (bottom.isdigit() or not bottom) and int(bottom or "1"):
            return (0, int(top) / int(bottom or "1"), name)
    number = name.removeprefix("p")
    return (1, float(number), name) if name.startswith("p") and number.removeprefix("-").isdigit() else (2, 0.0, name)


def quantile(ordered: Sequence[float], level: float) -> float:
    """The order statistic at or above the level of sorted values; 0 without any."""
    return ordered[max(0, math.ceil(level * len(ordered)) - 1)] if ordered else 0.0


def _class_report(name: str, ends: Sequence[Ended]) -> ClassReport:
    """One that failed or expired has missed its SLO."""
    completed = [ended for ended in ends if ended.state is Count.COMPLETED]
    known = [ended for ended in completed if ended.slack_s is not None]
    judgeable = class_order(name)[0] != 1
    latencies = sorted(ended.latency_s for ended in completed)
    return ClassReport(
        slo_class=name,
        judged=len(known) + (len(ends) - len(completed) if judgeable else 0),
        attained=sum(ended.slack_s is not None and ended.slack_s >= 0.0 for ended in known),
        completed=len(completed),
        latency_p50_s=quantile(latencies, 0.5),
        latency_p99_s=quantile(latencies, 0.99),
    )


def _calibration(judged: Sequence[Judged]) -> CalibrationReport:
    late_s = [each.completion_s - each.predicted.completion.p50_s for each in judged]
    errors = sorted(map(abs, late_s))
    of = max(1, len(judged))
    return CalibrationReport(
        samples=len(judged),
        within_p50=sum(each.completion_s <= each.predicted.completion.p50_s for each in judged) / of,
        within_p90=sum(each.completion_s <= each.predicted.completion.p90_s for each in judged) / of,
        error_p50_s=quantile(errors, 0.5),
        error_p90_s=quantile(errors, 0.9),
        bias_s=math.fsum(late_s) / of,
        rows=calibration_rows(judged),
    )


def _remember(memory: OrderedDict[str, Value], key: str, value: Value, most: int) -> None:
    memory[key] = value
    if len(memory) > most:
        memory.popitem(last=False)
