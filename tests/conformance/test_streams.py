"""Bounds of the streams, windows that end by themselves, and blocking reads. Servers keep their own time: states are not compared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from qlm.internal.v1.events_pb2 import EventKind, RequestEvent, RequestEvents
from qlm.internal.v1.frames_pb2 import FrameBatch
from qlm_core.vocabulary.errors import NotFound
from qlm_queue.port import Queue
from qlm_queue.values import BATCH_MAX, Bounds, ControlKind, StreamEntry

from .mirror import Mirror
from .scenario import CANCELLED, Scenario, acceptance, emission, happening, key_of
from .subjects import MemorySubject

DEADLINE_S = 30.0


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline_s, "it never happened"
        await asyncio.sleep(0.002)


async def scene_with(make_mirror: Callable[..., Mirror], bounds: Bounds) -> Scenario:
    mirror = make_mirror(bounds)
    await mirror.real.queue.start()
    return await Scenario(mirror).open()


def pass_time(mirror: Mirror, seconds: float) -> None:
    """Moves the clocks of memory queues; servers have their own."""
    for subject in (mirror.real, mirror.twin):
        if isinstance(subject, MemorySubject):
            subject.clock.now_s += seconds


async def test_streams_keep_their_last_entries(make_mirror: Callable[..., Mirror]) -> None:
    scene = await scene_with(make_mirror, Bounds(frames_max=5, control_max=4, events_max=7))
    pulled = await scene.run("r0")
    for number in range(20):
        await scene.mirror("emit", scene.incarnation, [emission(pulled["r0"], number, [number])])
    frames = await scene.mirror("read_frames", "g1", "0", 0)
    assert [list(FrameBatch.FromString(entry.payload).frames[0].token_ids) for entry in frames] == [[n] for n in range(15, 20)]
    for number in range(1, 10):
        await scene.queue_up(f"g{number}", f"r{number}")
    assert len(await scene.mirror("read_control", "a", "0", 0)) == 4
    events = await scene.mirror("read_events", "0", 0, 100)
    assert len(events) == 7
    assert RequestEvents.FromString(events[-1].payload).events[0].acceptance_number == 10


async def test_events_are_read_in_pages(scene: Scenario) -> None:
    await scene.accept(*(f"r{number}" for number in range(5)))
    found: list[StreamEntry] = []
    while page := await scene.mirror("read_events", found[-1].entry_id if found else "0", 0, 2):
        assert len(page) <= 2
        found += page
    assert [RequestEvents.FromString(entry.payload).events[0].acceptance_number for entry in found] == [1, 2, 3, 4, 5]
    assert await scene.mirror("read_events", "$", 0, 2) == []


async def test_reported_events_join_the_others(scene: Scenario) -> None:
    mirror = scene.mirror
    await scene.accept("r1")
    swapped = happening(model="n", from_model="m", started_s=1.5, finished_s=2.5)
    offloaded = happening(EventKind.EVENT_KIND_KV_OFFLOADED, queue_id="1-1", incarnation="a/1", kv_tokens=17)
    await mirror("report", [swapped, offloaded])
    await mirror("report", [])
    await mirror("report", [swapped])
    found = [list(RequestEvents.FromString(entry.payload).events) for entry in await mirror("read_events", "0", 0, 10)]
    first, second = RequestEvent.FromString(swapped), RequestEvent.FromString(offloaded)
    assert [[event.kind for event in found[0]], *found[1:]] == [[EventKind.EVENT_KIND_ACCEPTED], [first, second], [first]]
    for wrong in ([b"\xff"], [swapped] * (BATCH_MAX + 1)):
        with pytest.raises(ValueError, match=r".*"):
            await mirror("report", wrong)


async def test_results_are_kept_for_their_window(make_mirror: Callable[..., Mirror]) -> None:
    mirror = make_mirror(Bounds(result_ttl_s=0.05))
    queue = mirror.real.queue
    await queue.start()
    await queue.accept(acceptance(key_of("r1")))
    await queue.cancel(key_of("r1"), CANCELLED)

    async def gone() -> bool:
        pass_time(mirror, 0.01)
        try:
            await queue.find(key_of("r1"))
        except NotFound:
            return True
        return False

    await eventually(gone)
    assert not (await queue.accept(acceptance(key_of("r1"), salt="another body"))).duplicate


async def test_frames_of_a_gateway_that_is_gone_are_deleted(make_mirror: Callable[..., Mirror]) -> None:
    mirror = make_mirror(Bounds(frames_ttl_s=0.05))
    await mirror.real.queue.start()
    await mirror.real.queue.accept(acceptance(key_of("r1")))
    await mirror.real.queue.cancel(key_of("r1"), CANCELLED)

    async def gone() -> bool:
        pass_time(mirror, 0.01)
        return not await mirror.real.queue.read_frames("g1", "0", 0)

    await eventually(gone)
    assert (await mirror.real.dump()).frames == {}


async def _accept(queue: Queue) -> Any:
    return await queue.accept(acceptance(key_of("late")))


@pytest.mark.parametrize("what", ["arrivals", "events", "frames", "control"])
async def test_a_blocking_read_wakes_when_there_is_something(mirror: Mirror, what: str) -> None:
    queue = mirror.real.queue
    scene = await Scenario(mirror).open()
    await scene.run("r1")
    reads: dict[str, Callable[[float], Awaitable[Any]]] = {
        "arrivals": lambda block_s: queue.read_arrivals(block_s, 10),
        "events": lambda block_s: queue.read_events("$", block_s, 10),
        "frames": lambda block_s: queue.read_frames("g1", "0", block_s),
        "control": lambda block_s: queue.read_control("a", "$", block_s),
    }
    await queue.read_arrivals(0, 10)
    started_s = time.monotonic()
    assert list(await reads[what](0.05)) == []
    assert time.monotonic() - started_s >= 0.04
    waiting = asyncio.ensure_future(reads[what](DEADLINE_S))
    for number in range(10_000):  # until the read waits, what "$" means is not fixed
        if what == "arrivals":
            await queue.accept(acceptance(key_of(f"late{number}")))
        else:
            await queue.accept(acceptance(key_of("late")))
            await queue.attach(key_of("r1"), f"g{number % 2 + 5}", 0)
            if what == "events":
                await queue.accept(acceptance(key_of(f"event{number}")))
            if what == "frames":
                await queue.cancel(key_of("late"), CANCELLED)
        if waiting.done():
            break
        await asyncio.sleep(0.001)
    found = await waiting
    assert time.monotonic() - started_s < DEADLINE_S
    if what == "control":
        assert found[0].kind is ControlKind.GATEWAY_REBOUND
    else:
        assert found


async def test_a_waiting_read_ends_when_it_is_cancelled(mirror: Mirror) -> None:
    queue = mirror.real.queue
    await queue.start()
    waiting = asyncio.ensure_future(queue.read_events("$", 60.0, 10))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not (await queue.accept(acceptance(key_of("r1")))).duplicate


async def test_start_and_stop_may_be_repeated(make_mirror: Callable[..., Mirror]) -> None:
    queue = make_mirror().real.queue
    await queue.stop()
    await queue.start()
    await queue.start()
    await queue.accept(acceptance(key_of("r1")))
    await queue.stop()
    await queue.stop()
    await queue.start()
    assert (await queue.accept(acceptance(key_of("r1")))).duplicate
