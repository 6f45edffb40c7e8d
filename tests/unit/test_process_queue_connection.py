"""How a process finds its queue at the start."""

from __future__ import annotations

import asyncio

import pytest

from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_process.queue.clock import ServerClock
from qlm_process.queue.connection import open_queue, reach_queue
from qlm_process.settings import QueueSettings
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import Bounds

PATIENCE_S = 30.0


class AwayQueue(MemoryQueue):
    """Cannot be reached for the first so many tries."""

    def __init__(self, away_tries: int) -> None:
        super().__init__("test", Bounds(), lambda: 1_000.0)
        self.away_tries = away_tries
        self.tries = 0
        self.tried = asyncio.Event()

    async def start(self) -> None:
        self.tries += 1
        self.tried.set()
        if self.tries <= self.away_tries:
            raise Unavailable("nobody is there")
        await super().start()


async def test_it_tries_until_the_server_answers() -> None:
    queue = AwayQueue(2)
    clock = ServerClock(queue)
    assert await asyncio.wait_for(reach_queue(queue, clock, asyncio.Event()), PATIENCE_S)
    assert queue.tries == 3
    assert clock.now_s() >= 1_000.0
    await clock.stop()


async def test_a_stop_ends_the_trying() -> None:
    queue = AwayQueue(1_000)
    stop = asyncio.Event()
    reaching = asyncio.create_task(reach_queue(queue, ServerClock(queue), stop))
    await asyncio.wait_for(queue.tried.wait(), PATIENCE_S)
    stop.set()
    assert not await asyncio.wait_for(reaching, PATIENCE_S)


def test_one_process_alone_needs_a_url() -> None:
    with pytest.raises(ConfigError, match=r"queue\.url"):
        open_queue(QueueSettings())


# The estimate of the server's clock -----------------------------------------------------------------------------------


class Server:
    """A server whose time is `ahead_s` before ours, with calls that take `trip_s`, most of it on the way back."""

    def __init__(self) -> None:
        self.local_s = 100.0
        self.ahead_s = 1000.0
        self.trip_s = 0.0
        self.away = False
        self.requests = 0

    def monotonic(self) -> float:
        return self.local_s

    async def server_time_s(self) -> float:
        self.requests += 1
        if self.away:
            raise Unavailable("away")
        answer_s = self.local_s + self.ahead_s
        self.local_s += self.trip_s
        return answer_s


async def test_it_keeps_an_offset_and_is_monotonic_between_measurements() -> None:
    server = Server()
    clock = ServerClock(server, monotonic=server.monotonic)
    await clock.measure()
    assert clock.now_s() == 1100.0
    server.local_s += 5
    assert clock.now_s() == 1105.0


async def test_a_slow_answer_does_not_move_it_but_a_real_change_does() -> None:
    server = Server()
    clock = ServerClock(server, monotonic=server.monotonic)
    await clock.measure()
    server.trip_s = 0.5
    await clock.measure()
    assert clock.now_s() == server.local_s + 1000
    server.trip_s = 0.01
    server.ahead_s = 1001.0
    await clock.measure()
    assert clock.now_s() == pytest.approx(server.local_s + 1001.0, abs=0.005)


async def test_it_goes_on_while_the_server_is_away_and_starts_only_with_it() -> None:
    server = Server()
    server.away = True
    clock = ServerClock(server, every_s=0.001, monotonic=server.monotonic)
    with pytest.raises(Unavailable):
        await clock.start()
    server.away = False
    await clock.start()
    server.away = True
    before = server.requests
    async with asyncio.timeout(30):
        while server.requests < before + 3:
            await asyncio.sleep(0)
    assert clock.now_s() == 1100.0
    await clock.stop()
    await clock.stop()
