"""From an event of the stream to outcomes, and from their report to its message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal

from qlm.api.v1 import estimator_pb2
from qlm.field_copies import value_of
from qlm.internal.v1 import events_pb2
from qlm.internal.v1.events_pb2 import Moments, RequestEvent
from qlm_core.statistics.distribution import Normal
from qlm_estimator.events import Count, Ended
from qlm_estimator.outcomes.report import Outcomes, OutcomesReport
from qlm_estimator.predictions import Predicted, PredictedQuantiles, quantiles_of
from qlm_process.wire.profile import TIME_NUMBERS

LATENCY_MAX_S = 365 * 86_400.0
"""Longer than any objective or expiry: what an agent or a gateway claims beyond it is not believed."""

_COUNTED = {
    events_pb2.EVENT_KIND_ACCEPTED: Count.ACCEPTED,
    events_pb2.EVENT_KIND_PULLED: Count.PULLED,
    events_pb2.EVENT_KIND_UNPULLED: Count.UNPULLED,
    events_pb2.EVENT_KIND_MODEL_WARMED: Count.MODELS_WARMED,
    events_pb2.EVENT_KIND_KV_OFFLOADED: Count.KV_OFFLOADED,
    events_pb2.EVENT_KIND_KV_RESTORED: Count.KV_RESTORED,
}
_ENDS = {
    events_pb2.EVENT_KIND_COMPLETED: Count.COMPLETED,
    events_pb2.EVENT_KIND_FAILED: Count.FAILED,
    events_pb2.EVENT_KIND_CANCELLED: Count.CANCELLED,
    events_pb2.EVENT_KIND_EXPIRED: Count.EXPIRED,
}
_REQUEUED = {"evicted": Count.EVICTED, "lost": Count.RECOVERED}


def take(outcomes: Outcomes, event: RequestEvent, reported_s: float, classes: Mapping[str, str]) -> Predicted | Ended | None:
    """Counts an event; returns the prediction that a client was shown, or the request that ended."""
    if event.kind in _COUNTED:
        outcomes.count(reported_s, _COUNTED[event.kind])
    elif event.kind == events_pb2.EVENT_KIND_GROUPS_MOVED:
        outcomes.count(reported_s, Count.GROUPS_MOVED, len(event.group_ids))
    elif event.kind == events_pb2.EVENT_KIND_REQUEUED and event.cause in _REQUEUED:
        outcomes.count(reported_s, _REQUEUED[event.cause])
    elif event.kind == events_pb2.EVENT_KIND_MODEL_SWAPPED and event.from_model:
        outcomes.count(reported_s, Count.MODELS_SWAPPED)
    elif event.kind == events_pb2.EVENT_KIND_PREDICTED:
        return _predicted(event, reported_s)
    elif event.kind in _ENDS:
        ended = _ended(event, reported_s, outcomes.class_name(event.slo_class or classes.get(event.group_id, "")))
        outcomes.end(ended)
        return ended
    return None


def to_proto(report: OutcomesReport) -> estimator_pb2.Outcomes:
    """Fields of the messages are named as counts and as the report's own."""
    operations = {field.name for field in estimator_pb2.Operations.DESCRIPTOR.fields}
    counts = {str(what): count for what, count in report.counts.items()}
    return estimator_pb2.Outcomes(
        window_s=report.window_s,
        classes=[estimator_pb2.ClassOutcomes(**asdict(each)) for each in report.classes],
        calibration=[estimator_pb2.CalibrationRow(**{**asdict(row), "time": TIME_NUMBERS[row.time]}) for row in report.calibration],
        operations=estimator_pb2.Operations(**{name: count for name, count in counts.items() if name in operations}),
        **{name: count for name, count in counts.items() if name not in operations},
    )


def _ended(event: RequestEvent, reported_s: float, slo_class: str) -> Ended:
    # The finish that an agent claims precedes its report by that call; any other is taken as the time of the report.
    end_s = event.finished_s if 0.0 < event.finished_s <= reported_s else reported_s
    accepted_s = event.accepted_ms / 1000.0
    slack_s = event.slack_s if event.HasField("slack_s") and abs(event.slack_s) <= LATENCY_MAX_S else None
    # The start that it claims is of its own attempt: the first one is known only where there was no other.
    started = event.attempt == 1 and 0.0 < event.started_s <= end_s
    return Ended(
        queue_id=event.queue_id,
        at_s=reported_s,
        state=_ENDS[event.kind],
        slo_class=slo_class,
        latency_s=min(max(0.0, end_s - accepted_s), LATENCY_MAX_S),
        slack_s=slack_s,
        wait_s=min(max(0.0, event.started_s - accepted_s), LATENCY_MAX_S) if started else None,
        output_tokens=event.output_tokens,
    )


def _predicted(event: RequestEvent, reported_s: float) -> Predicted | None:
    """None for what no client can have got."""
    completion = _quantiles(event, "predicted", "own_completion")
    if completion is None:
        return None
    wait = _quantiles(event, "predicted_wait", "own_wait") if event.HasField("predicted_wait_p50_s") else None
    return value_of(Predicted, event, at_s=reported_s, completion=completion, wait=wait)


def _quantiles(event: RequestEvent, time: str, own: Literal["own_wait", "own_completion"]) -> PredictedQuantiles | None:
    """The quantiles of a time and its `own` moments; None for quantiles of no time, and without moments for those of no distribution."""
    p50_s, p90_s, p99_s = (getattr(event, f"{time}_{level}_s") for level in ("p50", "p90", "p99"))
    believed = all(math.isfinite(value) and 0.0 <= value <= LATENCY_MAX_S for value in (p50_s, p90_s, p99_s))
    moments: Moments = getattr(event, own)
    known = event.HasField(own) and math.isfinite(moments.mean_s) and math.isfinite(moments.variance_s2) and moments.variance_s2 >= 0.0
    normal = Normal(moments.mean_s, moments.variance_s2) if known else None
    return quantiles_of(p50_s, p90_s, p99_s, normal) if believed and p50_s <= p90_s else None
