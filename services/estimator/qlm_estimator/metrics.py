"""Prometheus metrics of the estimator."""

from __future__ import annotations

from dataclasses import fields

from prometheus_client import Counter, Gauge, Histogram

from qlm_core.profile import ProfileSnapshot
from qlm_estimator.machine import Counts
from qlm_estimator.outcomes import Count, Ended, Judged
from qlm_process.metrics import Metrics

ERROR_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class EstimatorMetrics(Metrics):
    """What the estimator knows and how much it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.leader = Gauge(
            "qlm_estimator_leader", "1 while this process is the leader, which learns and publishes.", registry=self.registry
        )
        self.version = Gauge("qlm_estimator_profile_version", "Version of the newest profile snapshot.", registry=self.registry)
        self.slowdown = Gauge(
            "qlm_estimator_slowdown_ratio",
            "Measured over shipped durations of a model's runs on an instance.",
            ("instance", "model"),
            registry=self.registry,
        )
        self.slowdown_samples = Gauge(
            "qlm_estimator_slowdown_samples", "Runs behind the slowdown, faded.", ("instance", "model"), registry=self.registry
        )
        self.output_tokens = Gauge(
            "qlm_estimator_output_mean_tokens", "Mean output of a model's finished requests.", ("model",), registry=self.registry
        )
        self.output_samples = Gauge(
            "qlm_estimator_output_samples", "Finished requests behind the mean output, faded.", ("model",), registry=self.registry
        )
        self.publications = Counter("qlm_estimator_publications_total", "Profile snapshots published.", registry=self.registry)
        self.malformed = Counter(
            "qlm_estimator_malformed_entries_total", "Entries of the event stream that could not be read.", registry=self.registry
        )
        self.predict_seconds = Histogram("qlm_estimator_predict_seconds", "Duration of answered Predict calls.", registry=self.registry)
        self.outcomes = Counter(
            "qlm_estimator_outcomes_total",
            "Requests that ended, by SLO class and outcome: attained, missed, unjudged (completed, and no SLO in seconds is known), or the "
            "state that they ended in.",
            ("slo_class", "outcome"),
            registry=self.registry,
        )
        self.predictions = Counter(
            "qlm_estimator_judged_predictions_total",
            "Completions that clients were told and that came: within the predicted p50, within p90 (and not p50), or beyond.",
            ("within",),
            registry=self.registry,
        )
        self.prediction_error = Histogram(
            "qlm_estimator_prediction_error_seconds",
            "Between the predicted median and the completion, whichever came first.",
            buckets=ERROR_BUCKETS_S,
            registry=self.registry,
        )
        self._counters = {
            name: Counter(f"qlm_estimator_{metric}_total", text, registry=self.registry) for name, (metric, text) in _COUNTERS.items()
        }
        self._reported = Counts()

    def count_outcome(self, outcome: Ended | Judged) -> None:
        """A request ended, or a prediction was judged."""
        if isinstance(outcome, Judged):
            within = "p50" if outcome.actual_s <= outcome.p50_s else "p90" if outcome.actual_s <= outcome.p90_s else "beyond"
            self.predictions.labels(within).inc()
            self.prediction_error.observe(abs(outcome.actual_s - outcome.p50_s))
            return
        if outcome.state is not Count.COMPLETED:
            name = str(outcome.state)
        else:
            name = "unjudged" if outcome.slack_s is None else "attained" if outcome.slack_s >= 0.0 else "missed"
        self.outcomes.labels(outcome.slo_class, name).inc()

    def new_leader(self) -> None:
        """A machine begins to count from zero."""
        self._reported = Counts()

    def report_counts(self, counts: Counts) -> None:
        """Adds what a machine counted since the last report."""
        for field in fields(Counts):
            value: int = getattr(counts, field.name)
            self._counters[field.name].inc(value - getattr(self._reported, field.name))
            setattr(self._reported, field.name, value)

    def report_snapshot(self, snapshot: ProfileSnapshot) -> None:
        """Shows a snapshot; rows that it lacks disappear."""
        self.version.set(snapshot.version)
        for gauge in (self.slowdown, self.slowdown_samples, self.output_tokens, self.output_samples):
            gauge.clear()
        for hardware in snapshot.hardware:
            if hardware.instance:
                self.slowdown.labels(hardware.instance, hardware.model).set(hardware.slowdown)
                self.slowdown_samples.labels(hardware.instance, hardware.model).set(hardware.samples)
        for workload in snapshot.workload:
            if not workload.slo_class and not workload.token_class:
                self.output_tokens.labels(workload.model).set(workload.output_tokens_mean)
                self.output_samples.labels(workload.model).set(workload.samples)


_COUNTERS = {
    "events": ("events", "Lifecycle events read."),
    "lengths": ("length_samples", "Finished requests whose token counts were learned."),
    "speeds": ("speed_samples", "Runs whose duration was learned."),
    "refused": ("refused_samples", "Finished requests or runs that were left out: unknown model, absurd or uninformative figures."),
    "repeated": ("repeated_events", "Events that came again or out of order."),
    "gaps": ("event_gaps", "Times that events were trimmed before they could be read."),
    "missed": ("missed_requests", "Requests whose acceptance was in such a gap."),
}
"""Field of `Counts` -> name and help of its metric."""
