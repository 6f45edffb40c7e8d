"""A sample of the predictions shown to clients is written to the event stream."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from qlm.internal.v1 import events_pb2
from qlm_core.prediction.prediction_views import RequestPrediction
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.outlook.reports import PredictionReport, PredictionSample
from qlm_gateway.outlook.waits import RequestShape
from qlm_gateway.outlook.watch import PREDICTIONS_REPORTED_MAX, QueueWatch
from qlm_process.wire import profile as profile_wire
from qlm_process.wire.prediction import to_proto
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import Bounds

REQUEST = RequestShape(model="m", slo=Slo(kind=SloKind.COMPLETION, seconds=60.0), prompt_tokens=1, output_tokens_max=1)


def prediction(completion: Normal) -> RequestPrediction:
    return RequestPrediction(instance="a", wait=Normal.point(1.0), completion=completion, requests_ahead=3, profile_version=1)


async def watching(queue: MemoryQueue, random: Callable[[], float] = random.random) -> QueueWatch:
    """A watch that has read the waits once."""
    watch = QueueWatch(queue, {}, GatewayMetrics(), lambda: 1_000.0, lambda: 1_000.0, random, shipped=shipped_snapshot(), sleep=stopping)
    await one_round(watch, "waits")
    return watch


async def reported(queue: MemoryQueue) -> list[events_pb2.RequestEvent]:
    entries = await queue.read_events("0", 0.0, 100)
    return [event for entry in entries for event in events_pb2.RequestEvents.FromString(entry.payload).events]


async def test_predictions_are_reported_once_and_bounded() -> None:
    queue = MemoryQueue("test", Bounds(), lambda: 1_000.0)
    watch = await watching(queue, random.Random(1).random)
    for number in range(PREDICTIONS_REPORTED_MAX + 5):
        watch.accepted(f"{number}-0", 999.5, 1, REQUEST, prediction(Normal(mean=10.0, variance=4.0)))
    await watch.report()
    await watch.report()
    events = await reported(queue)
    assert len({event.queue_id for event in events}) == len(events) == PREDICTIONS_REPORTED_MAX
    assert {(event.kind, event.accepted_ms, event.model) for event in events} == {(events_pb2.EVENT_KIND_PREDICTED, 999_500, "m")}
    assert {(event.instance, event.requests_ahead, event.profile_version, event.gpu) for event in events} == {("a", 3, 1, "")}
    for event in events:
        assert event.predicted_p50_s == pytest.approx(10.0)
        assert event.predicted_p90_s == pytest.approx(12.563, abs=1e-3)
        assert event.predicted_p99_s == pytest.approx(14.653, abs=1e-3)
        assert event.HasField("predicted_wait_p50_s")
        assert event.predicted_wait_p50_s == event.predicted_wait_p99_s == pytest.approx(1.0)
        assert not event.HasField("own_wait")


async def test_a_normal_has_a_tail_below_zero_and_a_time_from_now_has_none() -> None:
    queue = MemoryQueue("test", Bounds(), lambda: 1_000.0)
    watch = await watching(queue)
    below = Normal(mean=-1.0, variance=0.01)
    found = replace(prediction(below), wait=below, own_completion=Normal(mean=-2.0, variance=0.5))
    watch.accepted("1-0", 999.5, 1, REQUEST, found)
    await watch.report()
    (event,) = await reported(queue)
    assert (event.predicted_p50_s, event.predicted_p90_s, event.predicted_p99_s) == (0.0, 0.0, 0.0)
    assert (event.own_completion.mean_s, event.own_completion.variance_s2) == (-2.0, 0.5)


async def test_what_is_learned_from_are_the_moments_before_calibration() -> None:
    queue = MemoryQueue("test", Bounds(), lambda: 1_000.0)
    watch = await watching(queue)
    found = replace(prediction(Normal(10.0, 4.0)), wait=Normal(6.0, 3.0), own_wait=Normal(5.0, 2.0), own_completion=Normal(9.0, 1.0))
    watch.accepted("1-0", 999.5, 1, REQUEST, found)
    await watch.report()
    (event,) = await reported(queue)
    assert (event.own_wait.mean_s, event.own_wait.variance_s2) == (5.0, 2.0)
    assert (event.own_completion.mean_s, event.own_completion.variance_s2) == (9.0, 1.0)
    assert event.predicted_wait_p50_s == pytest.approx(6.0)


async def test_no_end_is_predicted_before_the_start() -> None:
    """Wait and completion are calibrated apart from each other."""
    queue = MemoryQueue("test", Bounds(), lambda: 1_000.0)
    watch = await watching(queue)
    found = replace(prediction(Normal(mean=2.0, variance=1.0)), wait=Normal(mean=3.0, variance=4.0), prefill_s=0.25)
    watch.accepted("1-0", 999.5, 1, REQUEST, found)
    await watch.report()
    (event,) = await reported(queue)
    assert event.predicted_p50_s == pytest.approx(3.25)
    assert event.predicted_p90_s == pytest.approx(event.predicted_wait_p90_s + 0.25)


async def test_of_a_server_that_lost_all_it_had_the_shipped_profiles_hold_again() -> None:
    now_s, shipped = 1_000.0, shipped_snapshot()
    queue = MemoryQueue("test", Bounds(), lambda: now_s)
    watch = QueueWatch(queue, {}, GatewayMetrics(), lambda: now_s, lambda: now_s, shipped=shipped, sleep=stopping)
    learned = replace(shipped, version=3, hardware=shipped.hardware[:1])
    queue.state.profiles = (3, profile_wire.to_body(learned))
    await one_round(watch, "profiles")
    assert watch.profiles == learned
    queue.state.profiles = (0, b"")
    await one_round(watch, "profiles")
    assert watch.profiles == shipped


class RoundDone(Exception):
    """A loop has gone round once."""


async def stopping(seconds: float) -> None:
    raise RoundDone


async def one_round(watch: QueueWatch, name: str) -> None:
    loops = watch.loops()
    loop = loops.pop(name)
    for other in loops.values():
        other.close()
    with pytest.raises(RoundDone):
        await loop


def test_each_of_a_burst_has_the_same_chance() -> None:
    """The first of a burst have the fewest requests ahead: reported alone, depth would never be judged."""
    chance, counts = random.Random(7), [0] * 100
    for _ in range(400):
        sample = PredictionSample(10, chance.random)
        for number in range(100):
            found = prediction(Normal.point(1.0))
            sample.add(PredictionReport(queue_id=str(number), accepted_s=1.0, model="m", prediction=found))
        for each in sample.take():
            counts[int(each.queue_id)] += 1
        assert sample.take() == []
    assert sum(counts) == 4_000
    assert 300 < sum(counts[:10]) < 500
    assert 300 < sum(counts[-10:]) < 500


@given(st.integers(0, 60), st.floats(0.0, 1.0, exclude_max=True))
def test_a_sample_is_of_those_added_and_bounded(count: int, drawn: float) -> None:
    sample = PredictionSample(16, lambda: drawn)
    for number in range(count):
        sample.add(PredictionReport(queue_id=str(number), accepted_s=1.0, model="m", prediction=prediction(Normal.point(1.0))))
    taken = [each.queue_id for each in sample.take()]
    assert len(taken) == len(set(taken)) == min(count, 16)
    assert set(taken) <= {str(number) for number in range(count)}


# A prediction on the wire: quantiles, and how likely a request is late ------------------------------------------------


FOUND = RequestPrediction(
    instance="a", wait=Normal(10.0, 3.0**2), completion=Normal(30.0, 4.0**2), requests_ahead=7, profile_version=5, prefill_s=2.0
)


def test_quantiles_are_those_of_the_times() -> None:
    message, dice = to_proto(FOUND), np.random.default_rng(3)
    waits_s, completions_s = dice.normal(10.0, 3.0, 200_000), dice.normal(30.0, 4.0, 200_000)
    assert (message.wait_p50_s, message.wait_p90_s) == pytest.approx(tuple(np.quantile(waits_s, (0.5, 0.9))), abs=0.05)
    assert (message.completion_p50_s, message.completion_p90_s) == pytest.approx(tuple(np.quantile(completions_s, (0.5, 0.9))), abs=0.05)
    assert (message.requests_ahead, message.profile_version) == (7, 5)
    assert not message.HasField("probability_late"), "nothing judges it"


@pytest.mark.parametrize(
    ("slo", "elapsed_s", "expected"),
    [
        (Slo(kind=SloKind.COMPLETION, seconds=32.0), 0.0, ndtr((30.0 - 32.0) / 4.0)),
        (Slo(kind=SloKind.COMPLETION, seconds=32.0), 5.0, ndtr((30.0 - 27.0) / 4.0)),  # it has waited for some of it
        (Slo(kind=SloKind.COMPLETION, seconds=32.0), 32.0, 1.0),
        (Slo(kind=SloKind.FIRST_TOKEN, seconds=13.0), 0.0, ndtr((12.0 - 13.0) / 3.0)),  # the end of the prefill
        (Slo(kind=SloKind.FIRST_TOKEN, seconds=13.0), 4.0, ndtr((12.0 - 9.0) / 3.0)),
    ],
)
def test_late_is_beyond_what_is_left_of_the_slo(slo: Slo, elapsed_s: float, expected: float) -> None:
    assert to_proto(FOUND, slo, elapsed_s).probability_late == pytest.approx(expected)


def test_without_a_deadline_nothing_is_late() -> None:
    for slo in (Slo(kind=SloKind.PRIORITY, priority=1), Slo(kind=SloKind.COMPLETION)):
        assert not to_proto(FOUND, slo).HasField("probability_late")
