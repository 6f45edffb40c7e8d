"""How many predictions a gateway makes for its streams."""

from __future__ import annotations

import math

import pytest

from qlm.api.v1.request_pb2 import REQUEST_STATE_ACCEPTED, SLO_KIND_COMPLETION, Admission, Request, Slo
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import InvalidRequest
from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.outlook.updates import FINDS_PER_S_MAX, OutlookUpdates, checked_every_s
from qlm_gateway.outlook.watch import AWAY_AFTER_S, QueueWatch
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import Acceptance, Bounds


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def acceptance_of(key: RequestKey) -> Acceptance:
    slo = Slo(kind=SLO_KIND_COMPLETION, seconds=60.0)
    body = Request(model="m", text="x", admission=Admission(prompt_tokens=1, output_tokens_max=1, slo=slo))
    return Acceptance(key=key, body=body.SerializeToString(), digest=b"0" * 16, gateway="", slo_class="64s", prompt_tokens=1)


async def test_finds_are_bounded_by_the_second() -> None:
    clock = Clock()
    queue = MemoryQueue("test", Bounds(), clock)
    key = RequestKey("default", "r")
    await queue.accept(acceptance_of(key))
    watch = QueueWatch(queue, {}, GatewayMetrics(), clock, clock, shipped=shipped_snapshot())
    updates = OutlookUpdates(queue, watch, clock)
    assert await updates.of(key) is None  # nothing was read yet
    await watch.read_waits()
    most = int(FINDS_PER_S_MAX)
    for elapsed_s, expected in ((0.0, most), (0.125, most // 8), (1_000.0, most)):
        clock.now_s += elapsed_s
        await watch.read_waits()
        found = [await updates.of(key) for _ in range(3 * most)]
        outlooks = [outlook for outlook in found if outlook is not None]
        assert len(outlooks) == expected
        assert {(outlook.state, outlook.HasField("prediction")) for outlook in outlooks} == {(REQUEST_STATE_ACCEPTED, False)}


async def test_waits_that_were_read_long_ago_say_nothing() -> None:
    clock = Clock()
    queue = MemoryQueue("test", Bounds(), clock)
    key = RequestKey("default", "r")
    await queue.accept(acceptance_of(key))
    watch = QueueWatch(queue, {}, GatewayMetrics(), clock, clock, shipped=shipped_snapshot())
    updates = OutlookUpdates(queue, watch, clock)
    await watch.read_waits()
    clock.now_s += AWAY_AFTER_S
    assert watch.recent is not None
    assert await updates.of(key) is not None
    clock.now_s += 0.001
    assert watch.recent is None
    assert await updates.of(key) is None
    await watch.read_waits()
    assert await updates.of(key) is not None


async def test_what_does_not_wait_has_no_outlook() -> None:
    clock = Clock()
    queue = MemoryQueue("test", Bounds(), clock)
    watch = QueueWatch(queue, {}, GatewayMetrics(), clock, clock, shipped=shipped_snapshot())
    await watch.read_waits()
    assert await OutlookUpdates(queue, watch, clock).of(RequestKey("default", "nobody")) is None


@pytest.mark.parametrize("every_s", [0.0, 1.0, 3_600.0])
def test_a_pace_that_may_be_requested(every_s: float) -> None:
    assert checked_every_s(every_s) == every_s


@pytest.mark.parametrize("every_s", [-1.0, 0.99, 3_601.0, math.nan, math.inf])
def test_one_that_may_not(every_s: float) -> None:
    with pytest.raises(InvalidRequest):
        checked_every_s(every_s)
