"""From an entry of the event stream to outcomes, and from their report to its message."""

from __future__ import annotations

import math
from collections.abc import Iterator

from google.protobuf.message import DecodeError

from qlm.api.v1 import estimator_pb2
from qlm.internal.v1 import events_pb2
from qlm.internal.v1.events_pb2 import Moments, RequestEvent
from qlm_core.distribution import Normal
from qlm_estimator.events import entry_id_of
from qlm_estimator.outcomes.report import Count, Ended, Outcomes, OutcomesReport
from qlm_estimator.outcomes.windows import CalibrationRow, PredictedTime
from qlm_estimator.predictions import Judged, Predicted, Told, WaitEnded, told
from qlm_queue.values import StreamEntry

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
_TIMES = {
    PredictedTime.WAIT: estimator_pb2.PREDICTED_TIME_WAIT,
    PredictedTime.COMPLETION: estimator_pb2.PREDICTED_TIME_COMPLETION,
}
_REQUEUED = {"evicted": Count.EVICTED, "lost": Count.RECOVERED}


def take(outcomes: Outcomes, entry: StreamEntry, classes: dict[str, str]) -> Iterator[Ended | Judged | Predicted | WaitEnded]:
    """Counts the events of an entry; gives what clients were told, the first starts, the requests that ended and the predictions that were
    judged. `classes`: group id -> SLO class,
    for ends that do not tell it. Raises ValueError where the entry is malformed."""
    try:
        events = events_pb2.RequestEvents.FromString(entry.payload).events
    except DecodeError as error:
        raise ValueError(f"entry {entry.entry_id} is no RequestEvents message") from error
    told_s = entry_id_of(entry.entry_id)[0] / 1000.0
    for event in events:
        if event.kind in _COUNTED:
            outcomes.count(told_s, _COUNTED[event.kind])
            if event.kind == events_pb2.EVENT_KIND_PULLED and event.attempt == 1:
                yield WaitEnded(queue_id=event.queue_id, at_s=told_s)
        elif event.kind == events_pb2.EVENT_KIND_GROUPS_MOVED:
            outcomes.count(told_s, Count.GROUPS_MOVED, len(event.group_ids))
        elif event.kind == events_pb2.EVENT_KIND_REQUEUED and event.cause in _REQUEUED:
            outcomes.count(told_s, _REQUEUED[event.cause])
        elif event.kind == events_pb2.EVENT_KIND_MODEL_SWAPPED and event.from_model:
            outcomes.count(told_s, Count.MODELS_SWAPPED)
        elif event.kind == events_pb2.EVENT_KIND_PREDICTED:
            predicted = _predicted(event, told_s)
            if predicted is None:
                continue
            yield predicted
            judged = outcomes.predict(predicted)
            if judged is not None:
                yield judged
        elif event.kind in _ENDS:
            ended = _ended(event, told_s, outcomes.class_name(event.slo_class or classes.get(event.group_id, "")))
            judged = outcomes.end(ended)
            yield ended
            if judged is not None:
                yield judged


def to_proto(report: OutcomesReport) -> estimator_pb2.Outcomes:
    counts, calibration = report.counts, report.calibration
    return estimator_pb2.Outcomes(
        window_s=report.window_s,
        accepted=counts[Count.ACCEPTED],
        completed=counts[Count.COMPLETED],
        failed=counts[Count.FAILED],
        cancelled=counts[Count.CANCELLED],
        expired=counts[Count.EXPIRED],
        output_tokens=counts[Count.OUTPUT_TOKENS],
        classes=[
            estimator_pb2.ClassOutcomes(
                slo_class=each.slo_class,
                judged=each.judged,
                attained=each.attained,
                completed=each.completed,
                latency_p50_s=each.latency_p50_s,
                latency_p99_s=each.latency_p99_s,
            )
            for each in report.classes
        ],
        calibration=estimator_pb2.Calibration(
            samples=calibration.samples,
            within_p50=calibration.within_p50,
            within_p90=calibration.within_p90,
            error_p50_s=calibration.error_p50_s,
            error_p90_s=calibration.error_p90_s,
            bias_s=calibration.bias_s,
            rows=[_row_message(row) for row in calibration.rows],
        ),
        operations=estimator_pb2.Operations(
            pulled=counts[Count.PULLED],
            unpulled=counts[Count.UNPULLED],
            evicted=counts[Count.EVICTED],
            recovered=counts[Count.RECOVERED],
            kv_offloaded=counts[Count.KV_OFFLOADED],
            kv_restored=counts[Count.KV_RESTORED],
            models_swapped=counts[Count.MODELS_SWAPPED],
            models_warmed=counts[Count.MODELS_WARMED],
            groups_moved=counts[Count.GROUPS_MOVED],
        ),
    )


def _row_message(row: CalibrationRow) -> estimator_pb2.CalibrationRow:
    return estimator_pb2.CalibrationRow(
        time=_TIMES[row.time],
        model=row.model,
        gpu=row.gpu,
        depth=row.depth,
        samples=row.samples,
        within_p50=row.within_p50,
        within_p90=row.within_p90,
        within_p99=row.within_p99,
        bias_s=row.bias_s,
        r2=row.r2,
        pinball_p50_s=row.pinball_p50_s,
        pinball_p90_s=row.pinball_p90_s,
        pinball_p99_s=row.pinball_p99_s,
        actual_mean_s=row.actual_mean_s,
    )


def _ended(event: RequestEvent, told_s: float, slo_class: str) -> Ended:
    # The finish that an agent claims is before the telling by the call that told it; anything else is taken as told then.
    end_s = event.finished_s if 0.0 < event.finished_s <= told_s else told_s
    accepted_s = event.accepted_ms / 1000.0
    slack_s = event.slack_s if event.HasField("slack_s") and abs(event.slack_s) <= LATENCY_MAX_S else None
    # The start that it claims is of its own attempt: the first one is known only where there was no other.
    started = event.attempt == 1 and 0.0 < event.started_s <= end_s
    return Ended(
        queue_id=event.queue_id,
        at_s=told_s,
        state=_ENDS[event.kind],
        slo_class=slo_class,
        latency_s=min(max(0.0, end_s - accepted_s), LATENCY_MAX_S),
        slack_s=slack_s,
        wait_s=min(max(0.0, event.started_s - accepted_s), LATENCY_MAX_S) if started else None,
        output_tokens=event.output_tokens,
    )


def _predicted(event: RequestEvent, told_s: float) -> Predicted | None:
    """None for what no client can have been told."""
    own_completion = _moments(event.own_completion) if event.HasField("own_completion") else None
    own_wait = _moments(event.own_wait) if event.HasField("own_wait") else None
    completion = _told(event.predicted_p50_s, event.predicted_p90_s, event.predicted_p99_s, own_completion)
    if completion is None:
        return None
    tells_wait = event.HasField("predicted_wait_p50_s")
    wait = _told(event.predicted_wait_p50_s, event.predicted_wait_p90_s, event.predicted_wait_p99_s, own_wait) if tells_wait else None
    return Predicted(
        queue_id=event.queue_id,
        at_s=told_s,
        completion=completion,
        wait=wait,
        model=event.model,
        gpu=event.gpu,
        n_gpu=event.n_gpu,
        instance=event.instance,
        requests_ahead=event.requests_ahead,
        profile_version=event.profile_version,
    )


def _told(p50_s: float, p90_s: float, p99_s: float, own: Normal | None) -> Told | None:
    believed = all(math.isfinite(value) and 0.0 <= value <= LATENCY_MAX_S for value in (p50_s, p90_s, p99_s))
    return told(p50_s, p90_s, p99_s, own) if believed and p50_s <= p90_s else None


def _moments(message: Moments) -> Normal | None:
    """None for what is no distribution."""
    known = math.isfinite(message.mean_s) and math.isfinite(message.variance_s2) and message.variance_s2 >= 0.0
    return Normal(message.mean_s, message.variance_s2) if known else None
