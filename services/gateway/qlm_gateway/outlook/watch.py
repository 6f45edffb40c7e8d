"""Reads the queue at the gateway's own pace: the published waits, profiles, the drain rate; the expiry sweep; and the reports of
what clients were shown, which the estimator compares with what happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import structlog

from qlm.api.v1.request_pb2 import Result, ResultError
from qlm_core.prediction.planned_waits import PlannedWaits
from qlm_core.prediction.prediction_views import RequestPrediction
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.errors import QueueFull, Unavailable
from qlm_core.vocabulary.model import ModelSpec
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.outlook.drain_rate import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, DrainRate
from qlm_gateway.outlook.model_load import ModelLoad, model_loads
from qlm_gateway.outlook.reports import PredictionReport, PredictionSample
from qlm_gateway.outlook.waits import AcceptedSince, Outlook, RequestShape
from qlm_process.queue.polls import QueuePolls
from qlm_process.wire import profile as profile_wire
from qlm_process.wire import waits as waits_wire
from qlm_queue.overview import Overview, WaitsRecord
from qlm_queue.port import Queue
from qlm_queue.values import BATCH_MAX

WAITS_EVERY_S = 0.5
WAITS_AGE_MAX_S = 10.0
"""Older waits say nothing of one that begins now: the planner publishes every half second, behind very many groups every 5 s."""
AWAY_AFTER_S = 5.0
OVERVIEW_AGE_MAX_S = 0.5
"""Period of reads of the queue's status, however often clients request it."""
PROFILES_EVERY_S = 2.0
EXPIRE_EVERY_S = 1.0
EXPIRE_CALLS_MAX = 20
"""Calls of one sweep: what is left is for the next."""

REPORT_EVERY_S = 0.5
PREDICTIONS_REPORTED_MAX = 16
"""Most predictions in one report: a sample of those shown to clients since the previous one."""

EXPIRED_RESULT = Result(error=ResultError(reason="EXPIRED", message="expire_after_s passed before the request ended")).SerializeToString()
NO_WAITS = PlannedWaits(made_s=0.0, plan_version=0, profile_version=0, counted_to=0, instances={})
"""The waits of a queue without a planner."""

Sleep = Callable[[float], Awaitable[None]]


class QueueWatch:
    """`run` must be running, or all `loops`. Nothing here is in the way of a request: it takes what was read last. `shipped`: the profiles
    until others are published."""

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
        self.now_s = server_now_s
        self._queue = queue
        self._catalogue = catalogue
        self._metrics = metrics
        self._monotonic = monotonic
        self._sleep = sleep
        self._profiles = self._shipped = shipped
        self._published = 0
        self._read: WaitsRecord | None = None
        self._waits = NO_WAITS
        self._since = AcceptedSince()
        self._outlook: Outlook | None = None
        self._polls = QueuePolls(queue)
        self._polling = asyncio.Lock()
        self._seen: tuple[float, Overview] | None = None
        self._sample = PredictionSample(PREDICTIONS_REPORTED_MAX, random)
        self.drain_rate = DrainRate()

    @property
    def recent(self) -> Outlook | None:
        """The facts to predict from: None before the first read, and where the queue is `away`. Without classes where no planner has
        published for `WAITS_AGE_MAX_S`."""
        return None if self.away else self._outlook

    @property
    def instances(self) -> Mapping[str, int]:
        """How many live instances serve each model, by the newest publication."""
        return self._waits.instances

    @property
    def profiles(self) -> ProfileSnapshot:
        """The newest that were read, or the shipped ones."""
        return self._profiles

    @property
    def away(self) -> bool:
        """Whether no read has succeeded for `AWAY_AFTER_S`."""
        return self._outlook is None or self._monotonic() - self._outlook.read_s > AWAY_AFTER_S

    async def run(self) -> None:
        """Reads and sweeps until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, loop in self.loops().items():
                tasks.create_task(loop, name=name)

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Endless loops to run side by side, by name. Each awaits nothing but the queue and the sleep that was given, one call at a
        time."""
        return {
            "waits": self._repeat("read_waits", WAITS_EVERY_S, self.read_waits),
            "profiles": self._repeat("read_profiles", PROFILES_EVERY_S, self._read_profiles),
            "expiry": self._repeat("expire", EXPIRE_EVERY_S, self._sweep),
            "report": self._repeat("report", REPORT_EVERY_S, self.report),
        }

    async def overview(self) -> Overview:
        """The queue's groups and instances, at most `OVERVIEW_AGE_MAX_S` old. For people: a reading costs the queue O(groups). Raises
        Unavailable."""
        async with self._polling:
            now_s = self._monotonic()
            if self._seen is None or now_s - self._seen[0] >= OVERVIEW_AGE_MAX_S:
                self._seen = (now_s, await self._polls.poll(now_s))
            return self._seen[1]

    async def model_loads(self) -> Mapping[str, ModelLoad]:
        """Waiting and running requests by model, for a scrape, whose gauges of the whole queue it sets. Raises Unavailable."""
        oldest = (await self._queue.live_requests("", 1)).requests
        self._metrics.oldest_request.set(max(0.0, self.now_s() - oldest[0].accepted_s) if oldest else 0.0)
        self._metrics.held_ratio.set(max((each.held / each.limit for each in await self._queue.held() if each.limit), default=0.0))
        return model_loads(await self.overview(), self._catalogue, self._profiles)

    async def read_pauses(self) -> None:
        """After a change of the pauses here: answers and predictions from now on have it. Raises Unavailable."""
        async with self._polling:  # a reading that began before the change is over, and is dropped
            self._seen = None
        await self.read_waits()

    def accepted(self, queue_id: str, accepted_s: float, number: int, request: RequestShape, shown: RequestPrediction | None) -> None:
        """A request was accepted, with this acceptance number, and its client shown this prediction."""
        if self._outlook is None:
            return
        self._outlook.accepted(request, number)
        if shown is not None:
            instance = self._outlook.instance(shown.instance)
            self._sample.add(
                PredictionReport(queue_id=queue_id, accepted_s=accepted_s, model=request.model, prediction=shown, instance=instance)
            )

    def retry_after_s(self, refusal: QueueFull, name: str) -> float:
        """When a place is free for a request that was refused. A tenant or class (`name`) that holds `limit` of all that
        live has that share of those that end."""
        bound, limit = refusal.details.get("bound", ""), refusal.details.get("limit", "")
        if bound.endswith("_bytes"):  # results free bytes at the end of their window, requests as they end
            freed = refusal.details.get("retry_after_s", "")
            return min(max(float(freed), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S) if freed else self.drain_rate.retry_after_s(place=bound)
        live = 0 if self._read is None else self._read.live
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

    async def read_waits(self) -> None:
        """Reads the published waits once. Raises Unavailable."""
        read_s = self._monotonic()
        read = await self._queue.read_waits()
        self.drain_rate.observe(read_s, read.accepted_count - read.live)
        self._metrics.drain_per_second.set(self.drain_rate.per_s)
        if self._read is None or read.body != self._read.body:
            self._take(read.body)
        self._read = read
        if self._outlook is not None and self._outlook.failures:
            self._metrics.predictions_failed.inc(len(self._outlook.failures))
            structlog.get_logger().error("predictions_failed", count=len(self._outlook.failures), error=self._outlook.failures[-1])
        waits = self._waits if abs(self.now_s() - self._waits.made_s) <= WAITS_AGE_MAX_S else NO_WAITS
        self._outlook = Outlook(waits, self._catalogue, self._profiles, self._since, read.pauses, read_s=read_s)

    def _take(self, body: bytes) -> None:
        try:
            self._waits = waits_wire.from_body(body) if body else NO_WAITS
        except ValueError as error:
            structlog.get_logger().error("waits_unreadable", error=str(error))
            self._waits = NO_WAITS
        self._since.counted(self._waits.counted_to)

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
        """Reports predictions; those that cannot be reported are dropped, as they are a sample."""
        reports = self._sample.take()
        if reports:
            await self._queue.report([each.event().SerializeToString() for each in reports])

    async def _sweep(self) -> None:
        for _ in range(EXPIRE_CALLS_MAX):
            expired = await self._queue.expire(EXPIRED_RESULT)
            self._metrics.expired.inc(expired)
            if expired < BATCH_MAX:
                return
