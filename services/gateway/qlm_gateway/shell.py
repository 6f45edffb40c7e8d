"""One gateway process: its parts, put together, started and drained."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import structlog
from opentelemetry.trace import TracerProvider

from qlm.api.v1.gateway_pb2_grpc import add_GatewayServicer_to_server
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import Unavailable
from qlm_core.vocabulary.overload import Overload
from qlm_gateway.admission.entry import Entry
from qlm_gateway.batches.driver import BatchDriver
from qlm_gateway.batches.objects import open_objects
from qlm_gateway.batches.store import BatchStore
from qlm_gateway.config import GatewayConfig, aliases_of, catalogue_of, open_texts
from qlm_gateway.front.callers import Callers
from qlm_gateway.front.http.batch_routes import BatchRoutes
from qlm_gateway.front.http.page.routes import PageRoutes
from qlm_gateway.front.http.server import HttpFront
from qlm_gateway.front.http.tools import tool_form_of
from qlm_gateway.front.service import GatewayService
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.outlook.model_load import ModelLoad
from qlm_gateway.outlook.updates import OutlookUpdates
from qlm_gateway.outlook.watch import QueueWatch
from qlm_gateway.streams.hub import StreamHub
from qlm_gateway.streams.machine import GatewayMachine
from qlm_gateway.text.model_text import ModelText
from qlm_process.grpc_server import GrpcServer
from qlm_process.identity.key_ring import open_key_ring
from qlm_process.queue.clock import ServerClock
from qlm_process.queue.connection import reach_queue
from qlm_process.queue.leases import RoleElection
from qlm_process.settings import ModelSettings
from qlm_queue.port import Queue

BATCHES_ROLE = "batches"
SERVICE_NAME = "qlm.api.v1.Gateway"
HEALTH_EVERY_S = 0.25
STOP_GRACE_S = 1.0
"""For calls that are not streams, after the drain."""
SCRAPE_TIMEOUT_S = 1.0
"""Deadline of reading the queue for a scrape of the metrics."""
FAREWELL_S = 0.5
"""For streams to get their end; one that reads nothing is cut off."""


class Gateway:
    """Serves a queue until `stop`. The queue is started here and stopped by its owner."""

    def __init__(
        self,
        config: GatewayConfig,
        queue: Queue,
        tracer_provider: TracerProvider,
        new_id: Callable[[], str],
        metrics: GatewayMetrics | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = config.gateway
        self._settings = settings
        self._queue = queue
        self._clock = ServerClock(queue)
        self.metrics = metrics or GatewayMetrics()
        texts = open_texts(config.models)
        catalogue = catalogue_of(config.models, texts)
        # A new id at each start: frames for the one before are nobody's, and their stream runs out.
        self.gateway_id = f"{settings.name}-{new_id()}"
        machine = GatewayMachine(self.gateway_id, settings.stream_limits())
        self._hub = StreamHub(queue, machine, texts, self.metrics, monotonic)
        specs = {name: entry.spec for name, entry in catalogue.items()}
        self._watch = QueueWatch(queue, specs, self.metrics, monotonic, self._clock.now_s, shipped=shipped_snapshot())
        entry = Entry(
            queue=queue,
            catalogue=catalogue,
            texts=texts,
            limits=settings.admission_limits(),
            watch=self._watch,
            metrics=self.metrics,
            tracer=tracer_provider.get_tracer("qlm_gateway"),
            new_request_id=new_id,
            monotonic=monotonic,
            refuse_late=config.planner.overload is Overload.REFUSE,
        )
        updates = OutlookUpdates(queue, self._watch, monotonic)
        self._keys = open_key_ring(config.security)
        callers = Callers(self._keys)
        aliases = aliases_of(config.models)
        service = GatewayService(queue, catalogue, aliases, texts, entry, self._hub, self._watch, updates, self.metrics, callers)
        self._server = GrpcServer(
            settings.listen,
            [lambda server: add_GatewayServicer_to_server(service, server)],
            [SERVICE_NAME],
            settings.grpc,
            config.security,
            guarded=False,
        )
        store = BatchStore(open_objects(settings.batches.folder), settings.batches) if settings.batches.folder else None
        now_s = self._clock.now_s
        self._http = HttpFront(
            settings.http,
            service,
            texts,
            self.metrics,
            new_id,
            callers,
            config.security,
            PageRoutes(service, queue, callers, self.metrics.registry, settings.name, config.security.credentials(), monotonic),
            BatchRoutes(store, settings.batches, callers, now_s, settings.http.body_timeout_s) if store is not None else None,
            tool_forms_of(config.models, texts, aliases),
            is_serving=lambda: not self._watch.away and not self._hub.draining,
            is_draining=lambda: self._hub.draining,
        )

        lease = config.queue
        self._election = RoleElection(queue, BATCHES_ROLE, settings.name, ttl_s=lease.lease_ttl_s, renew_s=lease.lease_renew_s)
        self._batches: BatchDriver | None = None
        if store is not None:
            models = {**{name: name for name in catalogue}, **aliases}
            self._batches = BatchDriver(store, settings.batches, settings.http, service, models, self._http.result_document, now_s)

    @property
    def http_url(self) -> str:
        """Where the OpenAI API is served; empty where it is off, and before the start."""
        return self._http.url

    @property
    def admin_url(self) -> str:
        """Where the page and metrics are served alone; empty where they are not, and before the start."""
        return self._http.admin_url

    async def run(self, stop: asyncio.Event, on_ready: Callable[[str], None]) -> None:
        """Starts, calls `on_ready` with the address, and serves until `stop` is set; then drains. Raises ConfigError."""
        if not await reach_queue(self._queue, self._clock, stop):
            return
        background = asyncio.create_task(self._run_background())
        self.metrics.model_loads.read = partial(self._model_loads, asyncio.get_running_loop())
        stopping = asyncio.create_task(stop.wait())
        try:
            await self._server.start()
            await self._http.start()
            await self._server.set_serving(True)
            on_ready(self._server.address)
            both: list[asyncio.Task[Any]] = [background, stopping]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if background.done():
                await background  # raises the bug that ended it
            await self._drain()
        finally:
            stopping.cancel()
            self.metrics.model_loads.read = lambda: None
            await self._server.stop(0.0)  # first: calls in progress use what runs in the background
            await self._http.stop()
            background.cancel()
            await asyncio.wait([background])
            await self._clock.stop()

    def _model_loads(self, loop: asyncio.AbstractEventLoop) -> Mapping[str, ModelLoad] | None:
        """For the thread of a scrape; None where the queue is away."""
        reading = asyncio.run_coroutine_threadsafe(self._watch.model_loads(), loop)
        try:
            return reading.result(SCRAPE_TIMEOUT_S)
        except (TimeoutError, Unavailable, CancelledError):
            reading.cancel()
            return None

    async def _run_background(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hub.run())
            tasks.create_task(self._watch.run())
            tasks.create_task(self._keep_health())
            tasks.create_task(self._http.run())
            if self._keys is not None:
                tasks.create_task(self._keys.run())
            if self._batches is not None:
                tasks.create_task(self._drive_batches(self._batches))

    async def _drive_batches(self, driver: BatchDriver) -> None:
        """Drives batches while this gateway has the role; another takes over where it loses it."""
        while True:
            keeper = await self._election.win()
            driving = asyncio.create_task(driver.run())
            losing = asyncio.create_task(keeper.lost.wait())
            try:
                await asyncio.wait([driving, losing], return_when=asyncio.FIRST_COMPLETED)
            finally:
                driving.cancel()
                losing.cancel()
                await asyncio.wait([driving, losing])
                await keeper.stop(release=True)
            if not driving.cancelled():
                driving.result()

    async def _drain(self) -> None:
        """Nothing new is taken; open streams go on up to the grace, then end with DRAINING."""
        grace_s = self._settings.drain_grace_s
        self._hub.start_drain(grace_s)
        await self._server.set_serving(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + FAREWELL_S):
                await self._hub.drained()
        await self._server.stop(STOP_GRACE_S)
        await self._http.stop()

    async def _keep_health(self) -> None:
        """Says NOT_SERVING while the queue is away: then another gateway, or none, can take requests."""
        serving = True
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            wanted = not self._watch.away and not self._hub.draining
            if wanted != serving:
                serving = wanted
                await self._server.set_serving(serving)
                structlog.get_logger().warning("queue_back" if serving else "queue_away")


def tool_forms_of(models: tuple[ModelSettings, ...], texts: Mapping[str, ModelText], aliases: Mapping[str, str]) -> Mapping[str, str]:
    """Model or alias -> its ToolForm, of those that have one."""
    forms = {
        model.name: tool_form_of(texts[model.name].chat_template) if model.tool_calls == "auto" else model.tool_calls.removeprefix("none")
        for model in models
    }
    return {name: form for name, form in ({**forms, **{alias: forms[model] for alias, model in aliases.items()}}).items() if form}
