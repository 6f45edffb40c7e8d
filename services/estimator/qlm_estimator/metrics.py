"""Prometheus metrics of the estimator. Sample counts and shares of priors are in the profiles themselves (`qlm profiles export`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from prometheus_client import Counter, Gauge

from qlm_core.profiles.hardware_profile import TIMED_OPERATIONS, OperationSlowdown
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_estimator.events import Ended
from qlm_estimator.machine import Counts
from qlm_estimator.outcomes.report import CalibrationRow
from qlm_process.metrics import Metrics


class EstimatorMetrics(Metrics):
    """Metrics of learned values and of events read."""

    def __init__(self) -> None:
        super().__init__()
        self.leader = self._gauge("leader", "1 while this process is the leader, which learns and publishes.")
        self.version = self._gauge("profile_version", "Version of the newest profile snapshot.")
        self._of_snapshot = {name: self._gauge(name, text, labels) for name, (text, labels) in _SNAPSHOT.items()}
        self.malformed = self._counter("malformed_entries", "Entries of the event stream that could not be read.")
        self.outcomes = self._counter(
            "outcomes",
            "Requests that ended, by SLO class and outcome: attained, missed, unjudged (completed, and no SLO in seconds is known), or the "
            "state that they ended in.",
            ("slo_class", "outcome"),
        )
        self._calibration = {
            name: self._gauge(f"calibration_{name}", f"{text}, over the last hour of judged predictions; {LABELS_TEXT}", (*LABELS, *extra))
            for name, (text, extra) in _CALIBRATION.items()
        }
        self._counters = {name: self._counter(metric, text) for name, (metric, text) in _COUNTERS.items()}
        self._reported = Counts()

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"qlm_estimator_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"qlm_estimator_{name}_total", text, labels, registry=self.registry)

    def count_outcome(self, ended: Ended) -> None:
        self.outcomes.labels(ended.slo_class, ended.outcome).inc()

    def new_leader(self) -> None:
        """A machine begins to count from zero."""
        self._reported = Counts()
        self.report_calibration(())

    def report_calibration(self, rows: Iterable[CalibrationRow]) -> None:
        """Shows these rows and no others."""
        for gauge in self._calibration.values():
            gauge.clear()
        for row in rows:
            labels = (str(row.time), row.depth)
            self._calibration["samples"].labels(*labels).set(row.samples)
            self._calibration["bias_seconds"].labels(*labels).set(row.bias_s)
            if row.r2 is not None:
                self._calibration["r2_ratio"].labels(*labels).set(row.r2)
            for level, within in (("0.5", row.within_p50), ("0.9", row.within_p90), ("0.99", row.within_p99)):
                self._calibration["coverage_ratio"].labels(*labels, level).set(within)

    def report_counts(self, counts: Counts) -> None:
        """Adds what a machine counted since the last report."""
        for field in fields(Counts):
            value: int = getattr(counts, field.name)
            self._counters[field.name].inc(value - getattr(self._reported, field.name))
            setattr(self._reported, field.name, value)

    def report_snapshot(self, snapshot: ProfileSnapshot) -> None:
        """Shows a snapshot; rows that it lacks disappear."""
        self.version.set(snapshot.version)
        for gauge in self._of_snapshot.values():
            gauge.clear()
        for hardware in snapshot.hardware:
            if hardware.instance:
                labels = (hardware.instance, hardware.model)
                self._of_snapshot["slowdown_ratio"].labels(*labels).set(hardware.slowdown)
                for name in TIMED_OPERATIONS:
                    operation: OperationSlowdown = getattr(hardware, name)
                    if operation.samples:
                        self._of_snapshot["operation_slowdown_ratio"].labels(*labels, name).set(operation.slowdown)
        for workload in snapshot.workload:
            if not workload.slo_class and not workload.token_class:
                self._of_snapshot["output_mean_tokens"].labels(workload.model).set(workload.output_tokens_mean)
        for score in snapshot.length_model.scores:
            self._of_snapshot["length_model_used"].labels(score.model).set(score.used)
            self._of_snapshot["length_model_gain_ratio"].labels(score.model).set(score.gain)


_SNAPSHOT: dict[str, tuple[str, tuple[str, ...]]] = {
    "slowdown_ratio": ("Measured over shipped durations of a model's runs on an instance.", ("instance", "model")),
    "operation_slowdown_ratio": (
        "Measured over profiled durations of an operation on an instance: swap_warm and swap_cold (a model becomes active, from host "
        "memory or from disk), kv_swap.",
        ("instance", "model", "operation"),
    ),
    "output_mean_tokens": ("Mean output of a model's finished requests.", ("model",)),
    "length_model_used": (
        "1 where outputs of single requests are predicted by the length model, 0 where the median of their group is nearer.",
        ("model",),
    ),
    "length_model_gain_ratio": (
        "By how much the length model's mean absolute error was below that of the group median lately, used or not.",
        ("model",),
    ),
}
"""Gauges of the newest snapshot: name -> help and labels."""

LABELS = ("time", "depth")
LABELS_TEXT = "`time`: wait or completion; `depth`: requests ahead, the power of four at or above, empty: any"

_CALIBRATION: dict[str, tuple[str, tuple[str, ...]]] = {
    "samples": ("Predictions that clients were shown and whose time is known", ()),
    "coverage_ratio": ("Share of requests within the predicted quantile: right where it is the `level`", ("level",)),
    "bias_seconds": ("Mean time of requests after the predicted median; negative: before", ()),
    "r2_ratio": ("Share of the variance of actual times that the predicted medians explain, from ten samples on", ()),
}
"""Name -> help and further labels."""

_COUNTERS = {
    "events": ("events", "Lifecycle events read."),
    "lengths": ("length_samples", "Finished requests whose token counts were learned."),
    "speeds": ("speed_samples", "Runs whose duration was learned."),
    "operations": ("operation_samples", "Loads and moves of KV whose duration was learned."),
    "judged": ("judged_samples", "Completed requests whose prediction was compared with the actual time."),
    "refused": ("refused_samples", "Finished requests or runs that were left out: unknown model, absurd or uninformative figures."),
    "repeated": ("repeated_events", "Events received again or out of order."),
    "gaps": ("event_gaps", "Times that events were trimmed before they could be read."),
    "missed": ("missed_requests", "Requests whose acceptance was in such a gap."),
}
"""Field of `Counts` -> name and help of its metric."""
