"""Sends events that no script of the queue writes to its event stream. Best effort and at most once: requests do not depend on them, and a
repeat after a lost answer would count an operation twice."""

from __future__ import annotations

import asyncio
from collections import deque

import structlog
from prometheus_client import Counter

from qlm.internal.v1 import events_pb2
from qlm_core.vocabulary.errors import Unavailable
from qlm_queue.port import Queue
from qlm_queue.values import BATCH_MAX

WAITING_MAX = 2_000
"""Most waiting events; the oldest are dropped first."""

GATHER_S = 0.05
"""How long events wait for more, so that one entry takes many."""


class Reporter:
    """Takes events at any time; `run` sends them."""

    def __init__(self, queue: Queue, dropped: Counter) -> None:
        self._queue = queue
        self._dropped = dropped
        self._events: deque[bytes] = deque()
        self._some = asyncio.Event()

    def add(self, event: events_pb2.RequestEvent) -> None:
        """Queues an event."""
        if len(self._events) == WAITING_MAX:
            self._events.popleft()
            self._dropped.inc()
        self._events.append(event.SerializeToString())
        self._some.set()

    async def run(self) -> None:
        """Sends until it is cancelled. Each call has the queue's own deadline."""
        while True:
            await self._some.wait()
            await asyncio.sleep(GATHER_S)
            await self.flush()

    async def flush(self) -> None:
        """Sends the waiting events; events that the server does not take are dropped and counted."""
        while self._events:
            batch = [self._events.popleft() for _ in range(min(BATCH_MAX, len(self._events)))]
            try:
                await self._queue.report(batch)
            except Unavailable as error:
                self._dropped.inc(len(batch))
                structlog.get_logger().debug("events_not_reported", events=len(batch), error=str(error))
        self._some.clear()
