"""How a process finds its queue at the start."""

from __future__ import annotations

import asyncio

import pytest

from qlm_core.errors import ConfigError, Unavailable
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
