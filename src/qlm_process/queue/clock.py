"""The queue server's clock, as this process estimates it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from qlm_core.vocabulary.errors import Unavailable

MEASURE_EVERY_S = 5.0


class TimeSource(Protocol):
    """The part of a queue that the clock asks."""

    async def server_time_s(self) -> float: ...


class ServerClock:
    """`now_s()` is the server's time: an offset, measured every `every_s`, to the monotonic clock, so it is monotonic between
    measurements. A measurement is good to half its round trip; the offset changes only where it contradicts that. While the server is
    away the last offset holds."""

    def __init__(self, queue: TimeSource, *, every_s: float = MEASURE_EVERY_S, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._every_s = every_s
        self._monotonic = monotonic
        self._offset_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Measures once, then goes on in the background. Raises Unavailable. Safe twice."""
        if self._task is None:
            await self.measure()
            self._task = asyncio.create_task(self._keep_measuring(), name="server-clock")

    async def stop(self) -> None:
        """Ends the measuring; the last offset holds. Safe unstarted and twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()  # raises the bug that ended the measuring

    def now_s(self) -> float:
        """Seconds since the epoch by the server's clock. Needs one measurement before."""
        assert self._offset_s is not None, "the clock was not started"
        return self._monotonic() + self._offset_s

    async def measure(self) -> None:
        """Asks the server once. Raises Unavailable."""
        before_s = self._monotonic()
        server_s = await self._queue.server_time_s()
        after_s = self._monotonic()
        offset_s = server_s - (before_s + after_s) / 2
        error_s = (after_s - before_s) / 2
        if self._offset_s is None or abs(offset_s - self._offset_s) > error_s:
            self._offset_s = offset_s

    async def _keep_measuring(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.measure()
            except Unavailable as error:
                structlog.get_logger().debug("server_clock_not_measured", error=str(error))
