"""Background looks at the queue: the overview behind predictions and status, the drain rate, profiles, and the expiry sweep; and the
reports of what clients were told, which the estimator compares with what happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import structlog

from qlm.api.v1.request_pb2 import Result, ResultError
from qlm_core.errors import QueueFull, Unavailable
from qlm_core.model import ModelSpec
from qlm_core.prediction_views import RequestPrediction
from qlm_core.profile import ProfileSnapshot
from qlm_gateway.drain_rate import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, DrainRate
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.outlook import Outlook
from qlm_gateway.told import Sample, Told
from qlm_process.queue.arrival_rate import ArrivalRate
from qlm_process.queue.polls import QueueLooks
from qlm_process.queue.views import KeptViews, queue_views
from qlm_process.wire import profile as profile_wire
from qlm_queue.port import Queue
from qlm_queue.values import BATCH_MAX

OVERVIEW_EVERY_S = 0.5
AWAY_AFTER_S = 5.0
PROFILES_EVERY_S = 2.0
EXPIRE_EVERY_S = 1.0
EXPIRE_CALLS_MAX = 20
"""Calls of one sweep: what is left is for the next."""

REPORT_EVERY_S = 0.5
PREDICTIONS_REPORTED_MAX = 16
"""Of one report. They are a sample of what clients were told since the one before."""

EXPIRED_RESULT = Result(error=ResultError(reason="EXPIRED", message="expire_after_s passed before the request ended")).SerializeToString()


Sleep = Callable[[float], Awaitable[None]]


class QueueWatch:
    """`run` must be running, or all `loops`. Nothing here is in the way of a request: it reads what the last look found. `shipped`: the
    profiles until others are published."""

    def __init__(
        self,
        queue: Queue,
        catalogue: Mapping[str, ModelSpec],
        metrics: GatewayMetrics,
        monotonic: Callable[[], float],
        server_now_s: Callable[[], float],
        random: Callable[[], float] = random.random,
        *,
        shipped: ProfileSnapshot,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._queue = queue
        self._catalogue = catalogue
        self._metrics = metrics
        self._monotonic = monotonic
        self._server_now_s = server_now_s
        self._sleep = sleep
        self._profiles = self._shipped = shipped
        self._published = 0
        self._outlook: Outlook | None = None
        self._looking = asyncio.Lock()
        self._looks = QueueLooks(queue)
        self._views = KeptViews()
        self._told = Sample(PREDICTIONS_REPORTED_MAX, random)
        self._arrivals = ArrivalRate()
        self.drain_rate = DrainRate()

    @property
    def outlook(self) -> Outlook | None:
        """The last look, or None before the first."""
        return self._outlook

    @property
    def recent(self) -> Outlook | None:
        """The last look, to predict from: None before the first, and where the queue is `away`. What was true a while ago says nothing of
        a wait that begins now."""
        return None if self.away else self._outlook

    @property
    def profiles(self) -> ProfileSnapshot:
        """The newest that were read, or the shipped ones."""
        return self._profiles

    @property
    def away(self) -> bool:
        """Whether no look has succeeded for `AWAY_AFTER_S`."""
        return self._outlook is None or self._monotonic() - self._outlook.seen_s > AWAY_AFTER_S

    async def run(self) -> None:
        """Looks and sweeps until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, loop in self.loops().items():
                tasks.create_task(loop, name=name)

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What goes on side by side for ever, by name. Each awaits nothing but the queue and the sleep that was given, one call at a
        time."""
        return {
            "overview": self._repeat("overview", OVERVIEW_EVERY_S, self._look),
            "profiles": self._repeat("read_profiles", PROFILES_EVERY_S, self._read_profiles),
            "expiry": self._repeat("expire", EXPIRE_EVERY_S, self._sweep),
            "report": self._repeat("report", REPORT_EVERY_S, self.report),
        }

    async def fresh(self) -> Outlook:
        """A look that began after the call; askers at the same time share one. Raises Unavailable."""
        asked_s = self._monotonic()
        async with self._looking:
            outlook = self._outlook
            return outlook if outlook is not None and outlook.seen_s >= asked_s else await self._look_now()

    def told(self, queue_id: str, accepted_s: float, model: str, prediction: RequestPrediction) -> None:
        """A client was given this prediction of a new request."""
        instance = None if self._outlook is None else self._outlook.instance(prediction.instance)
        self._told.add(Told(queue_id=queue_id, accepted_s=accepted_s, model=model, prediction=prediction, instance=instance))

    def retry_after_s(self, refusal: QueueFull, name: str) -> float:
        """When a place is free for a request that was refused. Of those that end, a tenant or class (`name`) that holds `limit` of all that
        live has that share."""
        bound, limit = refusal.details.get("bound", ""), refusal.details.get("limit", "")
        if bound.endswith("_bytes"):  # results free bytes at the end of their window, requests as they end
            freed = refusal.details.get("retry_after_s", "")
            return min(max(float(freed), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S) if freed else self.drain_rate.retry_after_s(place=bound)
        live = 0 if self._outlook is None else self._outlook.overview.live
        share = min(1.0, int(limit) / live) if bound != "queue" and limit.isdigit() and live else 1.0
        return self.drain_rate.retry_after_s(share=share, place=f"{bound} {name}")

    async def _repeat(self, name: str, every_s: float, call: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await call()
            except Unavailable as error:
                self._metrics.queue_away.labels(name).inc()
                structlog.get_logger().debug("queue_away", call=name, error=str(error))
            await self._sleep(every_s)

    async def _look(self) -> None:
        async with self._looking:
            await self._look_now()

    async def _look_now(self) -> Outlook:
        seen_s = self._monotonic()
        overview = await self._looks.look(seen_s)
        self._arrivals.observe(seen_s, overview.accepted_count)
        self.drain_rate.observe(seen_s, overview.accepted_count - overview.live)
        self._metrics.drain_per_second.set(self.drain_rate.per_s)
        made_s = self._server_now_s()
        try:
            views = queue_views(overview, now_s=made_s, arrivals_per_s=self._arrivals.per_s, kept=self._views)
        except ValueError as error:
            # An instance that registered nonsense costs predictions, not the queue.
            structlog.get_logger().error("instances_unreadable", error=str(error))
            views = ()
        if self._outlook is not None and self._outlook.failures:
            self._metrics.predictions_failed.inc(len(self._outlook.failures))
            structlog.get_logger().error("predictions_failed", count=len(self._outlook.failures), error=self._outlook.failures[-1])
        self._outlook = Outlook(overview, views, self._catalogue, self._profiles, seen_s=seen_s, made_s=made_s)
        return self._outlook

    async def _read_profiles(self) -> None:
        version, body = await self._queue.read_profiles()
        if version == self._published:
            return
        try:
            self._profiles = profile_wire.from_body(body) if body else self._shipped  # empty: of a server that lost all it had
        except ValueError as error:
            structlog.get_logger().error("profiles_unreadable", version=version, error=str(error))
        self._published = version

    async def report(self) -> None:
        """What cannot be reported is not kept: it is a sample."""
        told = self._told.take()
        if told:
            await self._queue.report([each.event().SerializeToString() for each in told])

    async def _sweep(self) -> None:
        for _ in range(EXPIRE_CALLS_MAX):
            expired = await self._queue.expire(EXPIRED_RESULT)
            self._metrics.expired.inc(expired)
            if expired < BATCH_MAX:
                return
