"""A sample of what clients were told goes to the event stream."""

from __future__ import annotations

from qlm.internal.v1 import events_pb2
from qlm_core.distribution import Normal
from qlm_core.prediction import RequestPrediction
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.queue_watch import PREDICTIONS_REPORTED_MAX, QueueWatch
from qlm_queue.memory_queue import MemoryQueue
from qlm_queue.values import Bounds


def prediction(completion: Normal) -> RequestPrediction:
    return RequestPrediction(instance="a", wait=Normal.point(1.0), completion=completion, requests_ahead=3, profile_version=1)


async def told(queue: MemoryQueue) -> list[events_pb2.RequestEvent]:
    entries = await queue.read_events("0", 0.0, 100)
    return [event for entry in entries for event in events_pb2.RequestEvents.FromString(entry.payload).events]


async def test_what_clients_were_told_is_reported_once_and_bounded() -> None:
    queue = MemoryQueue("test", Bounds(), lambda: 1_000.0)
    watch = QueueWatch(queue, {}, GatewayMetrics(), lambda: 1_000.0, lambda: 1_000.0)
    for number in range(PREDICTIONS_REPORTED_MAX + 5):
        watch.told(f"{number}-0", 999.5, prediction(Normal(mean=10.0, variance=4.0)))
    await watch.report()
    await watch.report()
    events = await told(queue)
    assert [event.queue_id for event in events] == [f"{number}-0" for number in range(PREDICTIONS_REPORTED_MAX)]
    assert {(event.kind, event.accepted_ms) for event in events} == {(events_pb2.EVENT_KIND_PREDICTED, 999_500)}
    assert all(abs(event.predicted_p50_s - 10.0) < 1e-9 and 12.5 < event.predicted_p90_s < 12.6 for event in events)


async def test_a_normal_has_a_tail_below_zero_and_a_time_from_now_has_none() -> None:
    queue = MemoryQueue("test", Bounds(), lambda: 1_000.0)
    watch = QueueWatch(queue, {}, GatewayMetrics(), lambda: 1_000.0, lambda: 1_000.0)
    watch.told("1-0", 999.5, prediction(Normal(mean=-1.0, variance=0.01)))
    await watch.report()
    (event,) = await told(queue)
    assert (event.predicted_p50_s, event.predicted_p90_s) == (0.0, 0.0)
