"""The queue for filling it with hundreds of thousands of requests in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import TypeVar

from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import Bounds

CALLS_MAX = 200
"""Calls under way at a time."""
CALL_TIMEOUT_S = 30.0
FULL_BOUNDS = Bounds(queue_max=1_000_000, tenant_max=1_000_000, class_max=1_000_000)
"""Bounds that refuse nothing."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class BulkQueue(RedisQueue):
    """As `RedisQueue`, which writes the calls of one turn together, with the bounds and deadlines of a filling."""

    def __init__(self, url: str, name: str, bounds: Bounds = FULL_BOUNDS) -> None:
        super().__init__(url, name, bounds=bounds, call_timeout_s=CALL_TIMEOUT_S)


def chunks(items: Iterable[Item], size: int) -> Iterable[list[Item]]:
    """Lists of `size` items, the last one perhaps shorter."""
    left = iter(items)
    while chunk := list(islice(left, size)):
        yield chunk


async def in_bulk(call: Callable[[Item], Awaitable[Answer]], items: Iterable[Item]) -> AsyncIterator[Sequence[Answer]]:
    """The answers to a call for each item, CALLS_MAX at a time."""
    for chunk in chunks(items, CALLS_MAX):
        yield await asyncio.gather(*(call(item) for item in chunk))
