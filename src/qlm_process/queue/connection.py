"""From settings to a queue that answers."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_process.queue.clock import ServerClock
from qlm_process.settings import QueueSettings
from qlm_queue.port import Queue
from qlm_queue.redis.queue import RedisQueue

RETRY_S = 0.5
"""Between two tries to reach the server at the start of a process."""


def open_queue(settings: QueueSettings) -> Queue:
    """The queue of a process, not started. Raises ConfigError without a url."""
    if not settings.url:
        raise ConfigError("queue.url: needed to run one process alone, such as redis://127.0.0.1:6379 (`qlm up` starts its own server)")
    return RedisQueue(
        url=settings.url,
        name=settings.name,
        durability=settings.durability,
        replicas=settings.replicas,
        replica_wait_s=settings.replica_wait_s,
        bounds=settings.bounds.bounds(),
        call_timeout_s=settings.call_timeout_s,
    )


async def reach_queue(queue: Queue, clock: ServerClock, stop: asyncio.Event) -> bool:
    """Starts both, trying again until the server answers; False where `stop` was called before. Raises ConfigError."""
    while not stop.is_set():
        try:
            await queue.start()
            await clock.start()
            return True
        except Unavailable as error:
            structlog.get_logger().warning("queue_not_reached", error=error.message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await stop.wait()
    return False
