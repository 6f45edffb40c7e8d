"""A gateway in virtual time: the live service, entry, hub and machine, driven by tasks; clients call over the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from qlm.api.v1.gateway_pb2 import CancelRequest, GenerateRequest, StreamRequest, StreamResponse, SubmitRequest
from qlm_core.vocabulary.errors import QlmError, Unavailable
from qlm_core.vocabulary.overload import Overload
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_gateway.admission.catalogue import ModelEntry
from qlm_gateway.admission.entry import Entry
from qlm_gateway.admission.rules import AdmissionLimits
from qlm_gateway.front.service import GatewayService
from qlm_gateway.outlook.updates import OutlookUpdates
from qlm_gateway.outlook.watch import QueueWatch
from qlm_gateway.streams.events import ReaderId
from qlm_gateway.streams.hub import READ_BLOCK_S, READ_RETRY_S, TICK_S, StreamHub
from qlm_gateway.streams.machine import GatewayMachine
from qlm_gateway.streams.reader_stream import ReaderStream
from qlm_gateway.streams.readers import StreamLimits
from qlm_gateway.text.model_text import ApproximateText
from qlm_sim.world.process import Process, Task, suspend
from qlm_sim.world.site import Site

Message = GenerateRequest | StreamRequest | SubmitRequest | CancelRequest
"""Methods that a client may call."""

WINDOW_MESSAGES = 8
"""Messages on their way to a client before the gateway waits for it: HTTP/2 does it by bytes."""


class SimReaderStream(ReaderStream):
    """Waits in a task."""

    __slots__ = ("_process", "_task")

    def __init__(self, reader: ReaderId, process: Process) -> None:
        super().__init__(reader)
        self._process = process
        self._task: Task | None = None

    def notify(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            self._process.deliver(0.0, task.resume)

    async def wait(self) -> None:
        while not self.ready:
            await suspend(self._wait)

    def _wait(self, task: Task) -> None:
        self._task = task


class ServerCall:
    """A client's call at the gateway: the servicer's context. `send` takes a response to the client, or the end with its error."""

    def __init__(self, process: Process, send: Callable[[StreamResponse | None, QlmError | None], None]) -> None:
        self.task: Task | None = None  # that serves it
        self._process = process
        self._send = send
        self._on_the_way = 0
        self._waiting: Task | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def write(self, response: StreamResponse) -> None:
        """Waits while the client does not take the messages on their way."""
        while self._on_the_way >= WINDOW_MESSAGES:
            await suspend(self._wait)
        self._on_the_way += 1
        copy = StreamResponse()
        copy.CopyFrom(response)
        self._send(copy, None)

    def taken(self) -> None:
        self._on_the_way -= 1
        task, self._waiting = self._waiting, None
        if task is not None:
            self._process.deliver(0.0, task.resume)

    def end(self, error: QlmError | None) -> None:
        self._send(None, error)

    def _wait(self, task: Task) -> None:
        self._waiting = task


class SimGateway:
    """One process over all its lives."""

    def __init__(self, site: Site, name: str) -> None:
        self.process = site.process(name)
        self.open_calls: dict[ServerCall, str] = {}
        self._connecting: dict[ServerCall, None] = {}
        self._site = site
        self._queue = site.link(self.process)

    def start(self) -> None:
        """A new process of this name, and a gateway id of its own."""
        site, process = self._site, self.process
        process.begin()
        self.open_calls, self._connecting = {}, {}
        texts = {name: ApproximateText() for name in site.catalogue}
        catalogue = {name: ModelEntry(spec=spec) for name, spec in site.catalogue.items()}
        limits = StreamLimits(buffer_tokens_max=site.description.stream_buffer_tokens_max)
        self.machine = GatewayMachine(f"{process.name}-{site.new_id()}", limits)
        self._hub = StreamHub(
            self._queue,
            self.machine,
            texts,
            site.gateway_metrics,
            process.now_s,
            make_stream=lambda reader: SimReaderStream(reader, process),
        )
        self._hub.begin(process.spawn)
        watch = QueueWatch(
            self._queue,
            site.catalogue,
            site.gateway_metrics,
            process.now_s,
            process.now_s,
            site.chance.part(f"{process.name}/told/{process.epoch}").level,
            shipped=site.shipped,
            sleep=process.sleep,
        )
        entry = Entry(
            queue=self._queue,
            catalogue=catalogue,
            texts=texts,
            limits=AdmissionLimits(default_slo=Slo(kind=SloKind.COMPLETION, seconds=60.0)),
            watch=watch,
            metrics=site.gateway_metrics,
            tracer=site.tracing.get_tracer("qlm_gateway"),
            new_request_id=site.new_id,
            monotonic=process.now_s,
            refuse_late=site.policy.overload is Overload.REFUSE,
        )
        updates = OutlookUpdates(self._queue, watch, process.now_s)
        self._service = GatewayService(self._queue, catalogue, {}, texts, entry, self._hub, watch, updates, site.gateway_metrics)
        process.spawn(self._read_frames())
        process.spawn(self._keep_time())
        for name, loop in watch.loops().items():
            if name == "waits" and not site.description.predictions:
                loop.close()
            else:
                process.spawn(loop)

    def kill(self) -> None:
        """SIGKILL: its clients see their connections end."""
        calls = [*self.open_calls, *self._connecting]
        self.open_calls, self._connecting = {}, {}
        self.process.end()
        for call in calls:
            call.end(Unavailable("connection reset"))

    # Calls of clients -------------------------------------------------------------------------------------------------

    def connect(self, call: ServerCall) -> None:
        """Connects a client's call; if the process dies before it arrives, the client gets an error."""
        self._connecting[call] = None

    def serve(self, message: Message, call: ServerCall) -> None:
        """Serves a call until its end, which is sent to the client."""
        self._connecting.pop(call, None)
        self.open_calls[call] = type(message).__name__.removesuffix("Request").lower()
        call.task = self.process.spawn(self._serve(message, call))

    def drop(self, call: ServerCall) -> None:
        if call.task is not None:
            call.task.cancel()
        self.open_calls.pop(call, None)
        self._connecting.pop(call, None)

    async def _serve(self, message: Message, call: ServerCall) -> None:
        context = cast("Any", call)
        error: QlmError | None = None
        try:
            match message:
                case GenerateRequest():
                    await self._service.Generate(message, context)
                case StreamRequest():
                    await self._service.Stream(message, context)
                case SubmitRequest():
                    submitted = await self._service.Submit(message, context)
                    await call.write(StreamResponse(accepted=submitted.accepted))
                case CancelRequest():
                    await self._service.Cancel(message, context)
        except QlmError as failure:
            error = failure
        self.open_calls.pop(call, None)
        call.end(error)

    # The queue --------------------------------------------------------------------------------------------------------

    async def _read_frames(self) -> None:
        after = "0"
        while True:
            try:
                entries = await self._queue.read_frames(self._hub.gateway, after, READ_BLOCK_S)
            except Unavailable:
                await self.process.sleep(READ_RETRY_S)
                continue
            for entry in entries:
                after = entry.entry_id
                self._hub.on_batch(entry.payload)

    async def _keep_time(self) -> None:
        while True:
            await self.process.sleep(TICK_S)
            self._hub.tick()
