"""Outcomes of requests: attainment by class, windows, calibration, bounds."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from qlm.api.v1 import estimator_pb2
from qlm.internal.v1 import events_pb2
from qlm.internal.v1.events_pb2 import RequestEvent
from qlm_core.profiles.calibration import CalibratedTime
from qlm_core.statistics.distribution import Normal
from qlm_estimator.calibration.feedback import Feedback
from qlm_estimator.events import Count, Ended
from qlm_estimator.lifecycle_wire import events_of
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.outcomes import report as outcomes_module
from qlm_estimator.outcomes.report import OTHER_CLASS, R2_SAMPLES_MIN, Outcomes, class_order
from qlm_estimator.outcomes.wire import to_proto
from qlm_estimator.predictions import AGE_MAX_S, OUTSTANDING_MAX, Judged, Predicted, quantiles_of
from qlm_queue.values import StreamEntry


def ended(number: int, at_s: float, **fields: object) -> Ended:
    values: dict[str, object] = {"state": Count.COMPLETED, "slo_class": "8s", "latency_s": 4.0, "slack_s": 1.0, "output_tokens": 10}
    return Ended(queue_id=f"q{number}", at_s=at_s, **{**values, **fields})  # type: ignore[arg-type]


def predicted(number: int, p50_s: float, p90_s: float, at_s: float = 0.0) -> Predicted:
    return Predicted(queue_id=f"q{number}", at_s=at_s, completion=quantiles_of(p50_s, p90_s))


def entry(at_s: float, *events: RequestEvent) -> StreamEntry:
    return StreamEntry(entry_id=f"{round(at_s * 1000)}-0", payload=events_pb2.RequestEvents(events=events).SerializeToString())


def take(outcomes: Outcomes, read: StreamEntry, classes: dict[str, str]) -> list[Predicted | Ended]:
    return [each for each in events_of(read, outcomes, classes) if isinstance(each, Predicted | Ended)]


def judge(feedback: Feedback, *events: Predicted | Ended) -> list[Judged | None]:
    return [feedback.predict(each) if isinstance(each, Predicted) else feedback.end(each) for each in events]


def learner() -> Feedback:
    return Feedback(slowdown_of=lambda _model, _instance: 1.0)


def test_attainment_counts_what_ended_within_the_window() -> None:
    outcomes = Outcomes(since_s=0.0)
    outcomes.end(ended(1, 10.0, slack_s=-1.0))  # before the window
    outcomes.end(ended(2, 95.0, slack_s=0.0))
    outcomes.end(ended(3, 96.0, slack_s=-0.1, latency_s=9.0))
    outcomes.end(ended(4, 97.0, slo_class="1024s", slack_s=900.0))
    report = outcomes.report(100.0, 60.0)
    assert report.window_s == 60.0
    assert report.counts[Count.COMPLETED] == 3
    assert report.counts[Count.OUTPUT_TOKENS] == 30
    assert [(each.slo_class, each.judged, each.attained, each.completed) for each in report.classes] == [
        ("8s", 2, 1, 2),
        ("1024s", 1, 1, 1),
    ]


def test_failed_and_expired_requests_missed_their_objective_and_cancelled_ones_do_not_count() -> None:
    outcomes = Outcomes(since_s=0.0)
    for number, state in enumerate((Count.FAILED, Count.EXPIRED, Count.CANCELLED)):
        outcomes.end(ended(number, 5.0, state=state, slack_s=None))
    report = outcomes.report(10.0, 60.0)
    assert [(each.judged, each.attained, each.completed) for each in report.classes] == [(2, 0, 0)]
    assert (report.counts[Count.FAILED], report.counts[Count.EXPIRED], report.counts[Count.CANCELLED]) == (1, 1, 1)


def test_priorities_are_not_judged() -> None:
    outcomes = Outcomes(since_s=0.0)
    outcomes.end(ended(1, 5.0, slo_class="p-3", slack_s=None))
    outcomes.end(ended(2, 5.0, slo_class="p-3", slack_s=None, state=Count.FAILED))
    assert [(each.judged, each.completed) for each in outcomes.report(10.0, 60.0).classes] == [(0, 1)]


def test_the_window_is_no_longer_than_what_is_counted() -> None:
    assert Outcomes(since_s=90.0).report(100.0, 60.0).window_s == 10.0


def test_classes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes_module, "CLASSES_MAX", 2)
    outcomes = Outcomes(since_s=0.0)
    assert [outcomes.class_name(name) for name in ("8s", "16s", "32s", "8s", "")] == ["8s", "16s", OTHER_CLASS, "8s", ""]


@pytest.mark.parametrize("prediction_first", [True, False])
def test_a_prediction_is_judged_in_either_order(prediction_first: bool) -> None:
    outcomes = Outcomes(since_s=0.0)
    prediction, end = predicted(1, 3.0, 5.0), ended(1, 5.0, latency_s=4.0, wait_s=1.0)
    first, judged = judge(learner(), prediction, end) if prediction_first else judge(learner(), end, prediction)
    assert first is None
    assert judged == Judged(predicted=prediction, at_s=5.0, completion_s=4.0, wait_s=1.0)
    outcomes.judge(judged)
    row = next(row for row in outcomes.report(10.0, 60.0).calibration if row.time is CalibratedTime.COMPLETION)
    assert (row.samples, row.within_p50, row.within_p90, row.bias_s) == (1, 0.0, 1.0, 1.0)


def test_a_request_that_did_not_complete_judges_no_prediction() -> None:
    feedback = learner()
    assert judge(feedback, predicted(1, 2.0, 4.0), ended(1, 5.0, state=Count.CANCELLED)) == [None, None]
    assert judge(feedback, ended(1, 5.0)) == [None], "it is forgotten"


def test_the_oldest_predictions_are_kept_until_they_are_too_old() -> None:
    """The deepest requests wait longest: left out for newer ones, they would never be judged."""
    feedback = learner()
    for number in range(OUTSTANDING_MAX + 1):
        feedback.predict(predicted(number, 2.0, 4.0, at_s=1.0))
    assert feedback.end(ended(0, 3_000.0)) is not None
    assert feedback.end(ended(OUTSTANDING_MAX, 3_000.0)) is None
    late_s = 1.0 + AGE_MAX_S + 1.0
    feedback.predict(predicted(-1, 2.0, 4.0, at_s=late_s))
    feedback.pass_time(late_s)
    assert feedback.end(ended(1, late_s)) is None
    assert feedback.end(ended(-1, late_s)) is not None


def test_the_order_of_classes() -> None:
    names = ["p3", "64s", "nans", "?", "1/4s", "p-1", "1/0s", "2s", "inf"]
    assert sorted(names, key=class_order) == ["1/4s", "2s", "64s", "p-1", "p3", "1/0s", "?", "inf", "nans"]


def test_events_are_counted_by_what_they_say() -> None:
    outcomes = Outcomes(since_s=0.0)
    kinds = events_pb2
    seen = take(
        outcomes,
        entry(
            10.0,
            RequestEvent(kind=kinds.EVENT_KIND_ACCEPTED, queue_id="q1"),
            RequestEvent(kind=kinds.EVENT_KIND_PULLED, queue_id="q1"),
            RequestEvent(kind=kinds.EVENT_KIND_REQUEUED, queue_id="q1", cause="evicted"),
            RequestEvent(kind=kinds.EVENT_KIND_REQUEUED, queue_id="q1", cause="lost"),
            RequestEvent(kind=kinds.EVENT_KIND_REQUEUED, queue_id="q1", cause="drained"),
            RequestEvent(kind=kinds.EVENT_KIND_MODEL_SWAPPED, model="b", from_model="a"),
            RequestEvent(kind=kinds.EVENT_KIND_MODEL_SWAPPED, model="a"),  # the first of an agent's life replaces none
            RequestEvent(kind=kinds.EVENT_KIND_KV_OFFLOADED, queue_id="q1"),
            RequestEvent(kind=kinds.EVENT_KIND_GROUPS_MOVED, instance="a", group_ids=["g", "h"]),
            RequestEvent(kind=kinds.EVENT_KIND_PREDICTED, queue_id="q1", predicted_p50_s=3.0, predicted_p90_s=9.0),
            RequestEvent(
                kind=kinds.EVENT_KIND_COMPLETED, queue_id="q1", accepted_ms=4_000, finished_s=9.5, slack_s=-0.5, slo_class="8s",
                output_tokens=7,
            ),
            RequestEvent(kind=kinds.EVENT_KIND_EXPIRED, queue_id="q2", group_id="g", accepted_ms=4_000),
        ),
        {"g": "64s"},
    )  # fmt: skip
    prediction = predicted(1, 3.0, 9.0, at_s=10.0)
    assert seen == [
        prediction,
        Ended(queue_id="q1", at_s=10.0, state=Count.COMPLETED, slo_class="8s", latency_s=5.5, slack_s=-0.5, output_tokens=7),
        Ended(queue_id="q2", at_s=10.0, state=Count.EXPIRED, slo_class="64s", latency_s=6.0),
    ]
    message = to_proto(outcomes.report(20.0, 60.0))
    operations = {field.name: getattr(message.operations, field.name) for field in message.operations.DESCRIPTOR.fields}
    assert operations == {
        "pulled": 1, "unpulled": 0, "evicted": 1, "recovered": 1, "kv_offloaded": 1, "kv_restored": 0, "models_swapped": 1,
        "models_warmed": 0, "groups_moved": 2,
    }  # fmt: skip
    assert (message.accepted, message.completed, message.expired, message.output_tokens) == (1, 1, 1, 7)
    assert [(each.slo_class, each.judged, each.attained) for each in message.classes] == [("8s", 1, 0), ("64s", 1, 0)]


@pytest.mark.parametrize("claimed", [math.nan, math.inf, -1.0, 1e12])
def test_absurd_claims_are_not_believed(claimed: float) -> None:
    outcomes = Outcomes(since_s=0.0)
    prediction = RequestEvent(kind=events_pb2.EVENT_KIND_PREDICTED, queue_id="q1", predicted_p50_s=claimed, predicted_p90_s=1.0)
    done = RequestEvent(
        kind=events_pb2.EVENT_KIND_COMPLETED, queue_id="q1", accepted_ms=4_000, finished_s=claimed, slack_s=claimed * 2, slo_class="8s"
    )
    (end,) = take(outcomes, entry(10.0, prediction, done), {})
    assert isinstance(end, Ended)
    assert end.latency_s == 6.0
    assert end.slack_s is None or end.slack_s == -2.0
    assert outcomes.report(20.0, 60.0).calibration == ()


def prediction_event(**fields: object) -> RequestEvent:
    values: dict[str, object] = {
        "queue_id": "q1", "predicted_p50_s": 8.0, "predicted_p90_s": 9.0, "predicted_p99_s": 10.0, "predicted_wait_p50_s": 1.0,
        "predicted_wait_p90_s": 2.0, "predicted_wait_p99_s": 3.0, "model": "m", "gpu": "A100-80GB", "n_gpu": 2, "instance": "a",
        "requests_ahead": 5, "profile_version": 7,
    }  # fmt: skip
    return RequestEvent(kind=events_pb2.EVENT_KIND_PREDICTED, **{**values, **fields})  # type: ignore[arg-type]


def completion_event(**fields: object) -> RequestEvent:
    values: dict[str, object] = {"queue_id": "q1", "attempt": 1, "accepted_ms": 4_000, "started_s": 6.5, "finished_s": 9.5}
    return RequestEvent(kind=events_pb2.EVENT_KIND_COMPLETED, **{**values, **fields})  # type: ignore[arg-type]


def judged_of(*events: RequestEvent) -> Judged:
    *_, judged = judge(learner(), *take(Outcomes(since_s=0.0), entry(10.0, *events), {}))
    assert judged is not None
    return judged


def test_predictions_of_wait_and_completion_are_judged() -> None:
    own = events_pb2.Moments(mean_s=0.5, variance_s2=0.25)
    judged = judged_of(prediction_event(own_wait=own), completion_event())
    wait, completion = judged.predicted.wait, judged.predicted.completion
    assert wait is not None
    assert (wait.seconds, wait.own) == ((1.0, 2.0, 3.0), Normal(0.5, 0.25))
    assert (completion.seconds, completion.own.mean) == ((8.0, 9.0, 10.0), 8.0)
    assert (judged.predicted.model, judged.predicted.gpu, judged.predicted.n_gpu, judged.predicted.instance) == ("m", "A100-80GB", 2, "a")
    assert judged.predicted.requests_ahead == 5
    assert (judged.completion_s, judged.wait_s) == (5.5, 2.5)


@pytest.mark.parametrize("fields", [{"attempt": 2}, {"started_s": 0.0}, {"started_s": 9.6}, {"started_s": math.nan}])
def test_a_wait_is_judged_only_by_a_first_start_that_is_known(fields: dict[str, float]) -> None:
    judged = judged_of(prediction_event(), completion_event(**fields))
    assert judged.wait_s is None
    assert judged.completion_s == 5.5


def test_a_clock_that_stepped_makes_no_time_negative() -> None:
    """Accepted at 20 s, by a clock that was set back since: ended and started before that."""
    judged = judged_of(prediction_event(), completion_event(accepted_ms=20_000))
    assert (judged.completion_s, judged.wait_s) == (0.0, 0.0)


@pytest.mark.parametrize("fields", [{"predicted_wait_p99_s": math.nan}, {"predicted_wait_p50_s": 5.0}, {"predicted_wait_p90_s": -1.0}])
def test_an_absurd_wait_is_left_out_and_the_completion_is_judged(fields: dict[str, float]) -> None:
    assert judged_of(prediction_event(**fields), completion_event()).predicted.wait is None


@pytest.mark.parametrize("variance_s2", [-1.0, math.inf, math.nan])
def test_absurd_moments_are_replaced_by_those_of_the_prediction(variance_s2: float) -> None:
    own = events_pb2.Moments(mean_s=1.0, variance_s2=variance_s2)
    assert judged_of(prediction_event(own_completion=own), completion_event()).predicted.completion.own.mean == 8.0


def test_every_figure_of_a_row_is_in_its_message() -> None:
    outcomes = Outcomes(since_s=0.0)
    for number in range(2 * R2_SAMPLES_MIN):
        found = replace(predicted(number, 5.0, 8.0), wait=quantiles_of(1.0, 2.0), model="m", gpu="A", requests_ahead=3)
        outcomes.judge(Judged(predicted=found, at_s=9.0, completion_s=1.0 + 0.9 * number, wait_s=0.3 * number))
    report = outcomes.report(10.0, 60.0)
    messages = to_proto(report).calibration
    times = {CalibratedTime.WAIT: estimator_pb2.PREDICTED_TIME_WAIT, CalibratedTime.COMPLETION: estimator_pb2.PREDICTED_TIME_COMPLETION}
    for row, message in zip(report.calibration, messages, strict=True):
        assert row.r2 is not None
        assert len({row.within_p50, row.within_p90, row.within_p99}) == 3
        message_fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
        assert message_fields == {**asdict(row), "time": times[row.time]}


def test_metrics_show_outcomes() -> None:
    metrics = EstimatorMetrics()
    for slack_s in (1.0, -1.0, None):
        metrics.count_outcome(ended(1, 5.0, slack_s=slack_s))
    metrics.count_outcome(ended(1, 5.0, state=Count.FAILED))
    for outcome in ("attained", "missed", "unjudged", "failed"):
        assert metrics.registry.get_sample_value("qlm_estimator_outcomes_total", {"slo_class": "8s", "outcome": outcome}) == 1.0
