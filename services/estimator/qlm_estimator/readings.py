"""The queue and the profiles as they were a moment ago, read together; one reading serves all calls that come meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import structlog

from qlm_core.assessment import Assessment
from qlm_core.model import ModelSpec
from qlm_core.prediction_views import QueueView
from qlm_core.profile import ProfileSnapshot
from qlm_process.queue.arrival_rate import ArrivalRate
from qlm_process.queue.clock import ServerClock
from qlm_process.queue.polls import QueueLooks
from qlm_process.queue.views import KeptViews, queue_views
from qlm_process.wire import profile as profile_wire
from qlm_queue.port import Queue


@dataclass(frozen=True, kw_only=True)
class Reading:
    """`at_s`: when the queue was read, by its own clock. `versions`: of the virtual queues."""

    at_s: float
    snapshot: ProfileSnapshot
    views: tuple[QueueView, ...]
    plan_version: int
    versions: Mapping[str, int]
    catalogue: Mapping[str, ModelSpec]

    @cached_property
    def assessment(self) -> Assessment:
        """Of all queues. Worked out once for a reading, in O(groups)."""
        return Assessment(self.catalogue, self.snapshot, self.views)


class QueueReader:
    """`fresh_s`: age up to which a reading is used again, so that the queue's load does not grow with the calls. Each call to the queue
    has the queue's own deadline; `now` and `newest` raise Unavailable."""

    def __init__(
        self, *, queue: Queue, clock: ServerClock, catalogue: Mapping[str, ModelSpec], shipped: ProfileSnapshot, fresh_s: float
    ) -> None:
        self._queue = queue
        self._clock = clock
        self._catalogue = catalogue
        self._snapshot = shipped
        self._unreadable = -1
        self._fresh_s = fresh_s
        self._reading = asyncio.Lock()
        self._last: Reading | None = None
        self._looks = QueueLooks(queue)
        self._views = KeptViews()
        self._arrivals = ArrivalRate()

    async def now(self) -> Reading:
        """At most `fresh_s` old."""
        async with self._reading:
            now_s = self._clock.now_s()
            last = self._last
            if last is None or not 0.0 <= now_s - last.at_s <= self._fresh_s:
                snapshot = await self.newest()
                overview = await self._looks.look(now_s)
                self._arrivals.observe(now_s, overview.accepted_count)
                last = self._last = Reading(
                    at_s=now_s,
                    snapshot=snapshot,
                    views=queue_views(overview, now_s=now_s, arrivals_per_s=self._arrivals.per_s, kept=self._views),
                    plan_version=overview.plan_version,
                    versions={record.instance: record.version for record in overview.virtual_queues},
                    catalogue=self._catalogue,
                )
            return last

    async def newest(self) -> ProfileSnapshot:
        """The newest snapshot that was published and can be read; the shipped one where none was."""
        version, body = await self._queue.read_profiles()
        if body and version not in (self._snapshot.version, self._unreadable):
            try:
                self._snapshot = profile_wire.from_body(body)
            except ValueError as error:
                self._unreadable = version
                structlog.get_logger().error("profiles_unreadable", version=version, error=str(error))
        return self._snapshot
