"""The queue with its calls gathered: for filling it with hundreds of thousands of requests in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from qlm_queue.redis_link import RedisLink
from qlm_queue.redis_queue import RedisQueue
from qlm_queue.scripts import Library, library_source
from qlm_queue.values import Bounds

CALLS_MAX = 200
"""Calls in one pipeline."""
CALL_TIMEOUT_S = 30.0
FULL_BOUNDS = Bounds(queue_max=1_000_000, tenant_max=1_000_000, class_max=1_000_000)
"""Nothing is refused."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class PipelinedLink(RedisLink):
    """Sends the calls made in one turn of the event loop together."""

    def __init__(self, url: str, library: Library, call_timeout_s: float) -> None:
        super().__init__(url, library, call_timeout_s)
        self._gathered: list[tuple[str, list[str], list[Any], asyncio.Future[Any]]] = []

    async def call(self, name: str, keys: list[str], args: list[Any]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._gathered.append((name, keys, args, future))
        if len(self._gathered) == 1:
            await asyncio.sleep(0)  # the first of a turn sends for all
            await self._send()
        return await future

    async def _send(self) -> None:
        gathered, self._gathered = self._gathered, []
        pipeline = self.client.pipeline(transaction=False)
        for name, keys, args, _ in gathered:
            pipeline.fcall(self._library.function(name), len(keys), *keys, *args)
        try:
            answers = await self.run(pipeline.execute)
        except BaseException:
            for _, _, _, future in gathered:
                future.cancel()
            raise
        for (_, _, _, future), answer in zip(gathered, answers, strict=True):
            future.set_result(answer)


class BulkQueue(RedisQueue):
    """As `RedisQueue`; calls that are made at the same time go in one write. Raises at the first call that a server refuses."""

    def __init__(self, url: str, name: str, bounds: Bounds = FULL_BOUNDS) -> None:
        super().__init__(url, name, bounds=bounds, call_timeout_s=CALL_TIMEOUT_S)
        self._link = PipelinedLink(url, Library(library_source()), CALL_TIMEOUT_S)


def chunks(items: Iterable[Item], size: int) -> Iterable[list[Item]]:
    """Lists of `size` items, the last one perhaps shorter."""
    left = iter(items)
    while chunk := list(islice(left, size)):
        yield chunk


async def in_bulk(call: Callable[[Item], Awaitable[Answer]], items: Iterable[Item]) -> AsyncIterator[Sequence[Answer]]:
    """The answers to a call for each item, CALLS_MAX at a time."""
    for chunk in chunks(items, CALLS_MAX):
        yield await asyncio.gather(*(call(item) for item in chunk))
