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
        self._gauges = {
            name: Gauge(f"qlm_estimator_{name}", text, labels.split(), registry=self.registry) for name, (labels, text) in _GAUGES.items()
        }
        self.leader = self._gauges["leader"]
        self.malformed = self._counter("malformed_entries", "Entries of the event stream that could not be read.")
        self.outcomes = self._counter(
            "outcomes",
            "Requests that ended, by SLO class and outcome: attained, missed, unjudged (completed, and no SLO in seconds is known), or the "
            "state that they ended in.",
            ("slo_class", "outcome"),
        )
        self._counters = {name: self._counter(metric, text) for name, (metric, text) in _COUNTERS.items()}
        self._reported = Counts()

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
        self._clear("calibration_samples", "calibration_bias_seconds", "calibration_r2_ratio", "calibration_coverage_ratio")
        for row in rows:
            labels = (str(row.time), row.depth)
            self._show("calibration_samples", row.samples, *labels)
            self._show("calibration_bias_seconds", row.bias_s, *labels)
            if row.r2 is not None:
                self._show("calibration_r2_ratio", row.r2, *labels)
            for level, within in (("0.5", row.within_p50), ("0.9", row.within_p90), ("0.99", row.within_p99)):
                self._show("calibration_coverage_ratio", within, *labels, level)

    def report_counts(self, counts: Counts) -> None:
        """Adds what a machine counted since the last report."""
        for field in fields(Counts):
            value: int = getattr(counts, field.name)
            self._counters[field.name].inc(value - getattr(self._reported, field.name))
            setattr(self._reported, field.name, value)

    def report_snapshot(self, snapshot: ProfileSnapshot) -> None:
        """Shows a snapshot; rows that it lacks disappear."""
        self._gauges["profile_version"].set(snapshot.version)
        self._clear("slowdown_ratio", "operation_slowdown_ratio", "output_mean_tokens", "length_model_used", "length_model_gain_ratio")
        for hardware in snapshot.hardware:
            if hardware.instance:
                self._show("slowdown_ratio", hardware.slowdown, hardware.instance, hardware.model)
                for name in TIMED_OPERATIONS:
                    operation: OperationSlowdown = getattr(hardware, name)
                    if operation.samples:
                        self._show("operation_slowdown_ratio", operation.slowdown, hardware.instance, hardware.model, name)
        for workload in snapshot.workload:
            if not workload.slo_class and not workload.token_class:
                self._show("output_mean_tokens", workload.output_tokens_mean, workload.model)
        for score in snapshot.length_model.scores:
            self._show("length_model_used", score.used, score.model)
            self._show("length_model_gain_ratio", score.gain, score.model)

    def _clear(self, *names: str) -> None:
        for name in names:
            self._gauges[name].clear()

    def _show(self, name: str, value: float, *labels: str) -> None:
        self._gauges[name].labels(*labels).set(value)


JUDGED = "judged in the last hour; `time`: wait or completion; `depth`: requests ahead, up to this power of four, empty: any"
_GAUGES = {
    "leader": ("", "1 while this process is the leader, which learns and publishes."),
    "profile_version": ("", "Version of the newest profile snapshot."),
    "slowdown_ratio": ("instance model", "Measured over shipped durations of a model's runs on an instance."),
    "operation_slowdown_ratio": (
        "instance model operation",
        "Measured over profiled durations of an operation on an instance: swap_warm and swap_cold (a model becomes active, from host "
        "memory or from disk), kv_swap.",
    ),
    "output_mean_tokens": ("model", "Mean output of a model's finished requests."),
    "length_model_used": (
        "model",
        "1 where outputs of single requests are predicted by the length model, 0 where the median of their group is nearer.",
    ),
    "length_model_gain_ratio": (
        "model",
        "By how much the length model's mean absolute error was below that of the group median lately, used or not.",
    ),
    "calibration_samples": ("time depth", f"Predictions that clients were shown and whose time is known, {JUDGED}"),
    "calibration_coverage_ratio": (
        "time depth level",
        f"Share of requests within the predicted quantile: right where it is the `level`, {JUDGED}",
    ),
    "calibration_bias_seconds": ("time depth", f"Mean time of requests after the predicted median; negative: before, {JUDGED}"),
    "calibration_r2_ratio": (
        "time depth",
        f"Share of the variance of actual times that the predicted medians explain, from ten samples on, {JUDGED}",
    ),
}
"""Name -> labels and help."""

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
