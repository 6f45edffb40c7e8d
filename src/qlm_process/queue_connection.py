"""From settings to the queue."""

from __future__ import annotations

from qlm_core.errors import ConfigError
from qlm_process.settings import QueueSettings
from qlm_queue.port import Queue
from qlm_queue.redis_queue import RedisQueue


def open_queue(settings: QueueSettings) -> Queue:
    """The queue of a process, not started. Raises ConfigError without a url."""
    if not settings.url:
        raise ConfigError("queue.url: needed to run one process alone, such as redis://127.0.0.1:6379 (`qlm up` starts its own server)")
    return RedisQueue(
        url=settings.url,
        name=settings.name,
        durability=settings.durability,
        bounds=settings.bounds.bounds(),
        call_timeout_s=settings.call_timeout_s,
    )
