"""The shell of the `GatewayMachine`: reads frames, queries the queue, and gives each reader the machine's output. No policy here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, assert_never

import structlog
from google.protobuf.message import DecodeError

from qlm.api.v1.request_pb2 import Logprobs, Request, Result
from qlm.internal.v1.frames_pb2 import FrameBatch
from qlm_core.vocabulary.errors import InternalError, NotFound, OffsetOutOfRange, QlmError, Unavailable
from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.streams.errors import draining, refusal_error
from qlm_gateway.streams.events import (
    Accepted,
    AcceptSent,
    Attach,
    AttachFailure,
    Closed,
    DeliverFrame,
    DeliverOutput,
    DrainStarted,
    Effect,
    EndByFrame,
    EndByRecord,
    Event,
    Find,
    Forget,
    FramesRead,
    Located,
    LocateFailed,
    Opened,
    ReaderId,
    ReaderKind,
    Refuse,
    Taken,
    Tick,
)
from qlm_gateway.streams.machine import GatewayMachine
from qlm_gateway.streams.reader_stream import ReaderStream
from qlm_gateway.text.logprobs import logprobs_part, stored_logprobs
from qlm_gateway.text.model_text import CONTEXT_TOKENS, ModelText
from qlm_gateway.wire import TOKEN_BYTES, frame_facts, message_of, tokens_of, without_output
from qlm_queue.port import Queue
from qlm_queue.values import Attached, LiveRequest, TerminalRecord

READ_BLOCK_S = 1.0
"""How long one read of frames waits for the first."""
READ_RETRY_S = 0.2
"""Pause after a read that failed; it goes on for as long as the process runs."""
TICK_S = 0.1
FRAMES_PER_TURN_MAX = 512
"""After so many frames the readers have their turn."""


class _Answer:
    """The queue's answer: output from the requested offset, and the record of a request that has ended."""

    __slots__ = ("logprobs", "pieces", "result", "tokens")

    def __init__(self, tokens: Sequence[int], pieces: Sequence[str], result: Result | None, logprobs: Logprobs | None = None) -> None:
        self.tokens = tokens
        self.pieces = pieces
        self.result = result
        self.logprobs = logprobs

    def logprobs_part(self, start: int, end: int) -> Logprobs | None:
        return None if self.logprobs is None else logprobs_part(self.logprobs, start, end)


Spawn = Callable[[Coroutine[Any, Any, None]], object]
"""Runs something beside the caller."""


class StreamHub:
    """All readers of one gateway. `run` must be running; `monotonic` is the clock of its durations. `make_stream`: of a reader's number.

    The virtual-time cluster, which has no asyncio, gives its own readers, calls `begin` in place of `run`, and `on_batch` and `tick`.
    """

    def __init__(
        self,
        queue: Queue,
        machine: GatewayMachine,
        texts: Mapping[str, ModelText],
        metrics: GatewayMetrics,
        monotonic: Callable[[], float],
        make_stream: Callable[[ReaderId], ReaderStream] = ReaderStream,
    ) -> None:
        self._queue = queue
        self._make_stream = make_stream
        self._machine = machine
        self._texts = texts
        self._metrics = metrics
        self._monotonic = monotonic
        self._streams: dict[ReaderId, ReaderStream] = {}
        self._next_reader = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._spawn: Spawn | None = None
        self._seen_gaps = 0
        self._seen_overruns = 0

    @property
    def gateway(self) -> str:
        return self._machine.gateway

    @property
    def draining(self) -> bool:
        return self._machine.draining

    def check_open(self) -> None:
        """Raises Unavailable DRAINING."""
        self._machine.check_open()

    def check_room(self) -> None:
        """Checks for room before a reader opens. Raises Unavailable DRAINING, GatewayFull."""
        try:
            self._machine.check_room()
        except QlmError as error:
            self._metrics.readers_refused.labels(error.reason).inc()
            raise

    async def run(self) -> None:
        """Reads frames and keeps time until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self.begin(tasks.create_task)
                tasks.create_task(self._read_frames(), name="frames")
                tasks.create_task(self._keep_time(), name="ticks")
        finally:
            self._spawn = None

    def begin(self, spawn: Spawn) -> None:
        """Queries the queue by `spawn` from now on."""
        self._spawn = spawn

    # Readers ----------------------------------------------------------------------------------------------------------

    def expect(self) -> ReaderStream:
        """A reader of a request that is about to be accepted: then `accepted` or `open` it, or `close` it."""
        stream = self._new_stream()
        self._step(AcceptSent(reader=stream.reader))
        return stream

    def accepted(self, stream: ReaderStream, key: RequestKey, queue_id: str, model: str) -> None:
        """Its request is in the queue, new, and bound to this gateway."""
        stream.model = model
        self._step(Accepted(reader=stream.reader, key=key, queue_id=queue_id))

    def open(self, key: RequestKey, kind: ReaderKind, offset: int = 0, stream: ReaderStream | None = None) -> ReaderStream:
        """A reader of an accepted request."""
        stream = stream or self._new_stream()
        self._step(Opened(reader=stream.reader, kind=kind, key=key, offset=offset))
        return stream

    def taken(self, stream: ReaderStream) -> None:
        """It took what was there, or wants to be given again what was forgotten."""
        stream.forgotten = False
        self._step(Taken(reader=stream.reader, offset=stream.offset))

    def close(self, stream: ReaderStream) -> None:
        """The reader is gone. Safe twice."""
        if self._streams.pop(stream.reader, None) is not None:
            self._step(Closed(reader=stream.reader))
            self._metrics.open_readers.dec()
            if not self._streams:
                self._empty.set()

    def start_drain(self, grace_s: float) -> None:
        self._step(DrainStarted(grace_s=grace_s))

    async def drained(self) -> None:
        """Until no reader is left. The machine ends them after the grace, but one that reads nothing does not hear of it."""
        await self._empty.wait()

    def _new_stream(self) -> ReaderStream:
        self._next_reader += 1
        stream = self._make_stream(self._next_reader)
        self._streams[stream.reader] = stream
        self._metrics.open_readers.inc()
        self._empty.clear()
        return stream

    # Machine ----------------------------------------------------------------------------------------------------------

    def _step(self, event: Event, answer: _Answer | None = None) -> None:
        for effect in self._machine.step(self._monotonic(), event):
            self._perform(effect, answer)
        if self._machine.gaps != self._seen_gaps or self._machine.overruns != self._seen_overruns:
            self._metrics.gaps.inc(self._machine.gaps - self._seen_gaps)
            self._metrics.overruns.inc(self._machine.overruns - self._seen_overruns)
            self._seen_gaps, self._seen_overruns = self._machine.gaps, self._machine.overruns

    def _perform(self, effect: Effect, answer: _Answer | None) -> None:
        if isinstance(effect, (Attach, Find)):
            self._start(effect)
            return
        stream = self._streams.get(effect.reader)
        if stream is None:
            return
        match effect:
            case DeliverFrame(frame=facts, skip=skip, offset=offset):
                frame = message_of(facts)
                logprobs = logprobs_part(frame.logprobs, skip, len(frame.token_ids)) if frame.HasField("logprobs") else None
                stream.give(offset, frame.token_ids[skip:], frame.pieces[skip:], logprobs)
            case DeliverOutput(skip=skip, offset=offset, count=count):
                assert answer is not None, "output is delivered with the answer that brought it"
                end = skip + count
                stream.give(offset, answer.tokens[skip:end], answer.pieces[skip:end], answer.logprobs_part(skip, end))
            case Forget():
                stream.forget()
            case EndByFrame(frame=facts):
                stream.result = without_output(message_of(facts).result)
            case EndByRecord():
                assert answer is not None, "a record is given with the answer that brought it"
                stream.result = answer.result
            case Refuse(refusal=refusal):
                stream.error = refusal_error(refusal, stream.failure)
            case _:
                assert_never(effect)
        stream.notify()

    def _start(self, effect: Attach | Find) -> None:
        kind = "find" if isinstance(effect, Find) else "bind" if effect.bind else "again"
        self._metrics.attaches.labels(kind).inc()
        if self._spawn is None:
            # The process stops or has not started: the call ends with an error, and the client asks another gateway.
            self._locate_failed(effect.reader, AttachFailure.UNAVAILABLE, draining())
            return
        self._spawn(self._locate(effect))

    async def _locate(self, effect: Attach | Find) -> None:
        stream = self._streams.get(effect.reader)
        try:
            if isinstance(effect, Find):
                located, answer = await self._find(effect)
            else:
                located, answer = await self._attach(effect, stream)
        except NotFound as error:
            self._locate_failed(effect.reader, AttachFailure.UNKNOWN_REQUEST, error)
        except OffsetOutOfRange as error:
            self._locate_failed(effect.reader, AttachFailure.OFFSET_OUT_OF_RANGE, _in_tokens(error))
        except Unavailable as error:
            self._locate_failed(effect.reader, AttachFailure.UNAVAILABLE, error)
        except (DecodeError, ValueError) as error:
            # A stored record that cannot be read is somebody's bug; it ends its own readers, not everybody's.
            structlog.get_logger().error("record_unreadable", key=repr(effect.key), exc_info=error)
            broken = InternalError("the stored request cannot be read; the gateway's log says why")
            self._locate_failed(effect.reader, AttachFailure.UNREADABLE, broken)
        else:
            self._step(located, answer=answer)

    async def _find(self, effect: Find) -> tuple[Located, _Answer]:
        found = await self._queue.find(effect.key)
        if isinstance(found, TerminalRecord):
            answer = _Answer((), (), Result.FromString(found.result))
            return Located(reader=effect.reader, queue_id=found.queue_id, ended=True, gateway=""), answer
        return Located(reader=effect.reader, queue_id=found.queue_id, ended=False, gateway=found.gateway), _Answer((), (), None)

    async def _attach(self, effect: Attach, stream: ReaderStream | None) -> tuple[Located, _Answer]:
        gateway = self.gateway if effect.bind else ""
        attached = await self._attached(effect, gateway)
        if attached.ended is not None:
            result = Result.FromString(attached.ended.result)
            queue_id, bound_to, model = attached.ended.queue_id, "", result.model
            pieces = list(result.output_pieces)[effect.offset :]
            tokens = () if result.output_pieces else tokens_of(attached.progress)
            produced = len(result.output_pieces) or attached.produced // TOKEN_BYTES
            logprobs = logprobs_part(result.logprobs, effect.offset, produced) if result.HasField("logprobs") else None
            without_output(result)  # it is kept until the reader has taken all
        else:
            live = attached.live
            assert live is not None, "one of ended and live is set"
            result, pieces = None, []
            queue_id, bound_to, model = live.queue_id, live.gateway, ""
            if live.text:
                whole = list(Result.FromString(attached.progress).output_pieces)
                tokens, pieces, produced = (), whole[effect.offset :], len(whole)
            else:
                tokens, produced = tokens_of(attached.progress), attached.produced // TOKEN_BYTES
            logprobs = stored_logprobs(attached.logprobs)
        if effect.offset > produced:  # of text; the queue counts bytes
            details = {"offset": str(effect.offset * TOKEN_BYTES), "produced": str(produced * TOKEN_BYTES)}
            raise OffsetOutOfRange("the offset is beyond the output", details=details)
        if stream is not None and not stream.model:
            stream.model = model or _model_of(attached.live)
            stream.before = await self._tokens_before(effect, stream.model)
        located = Located(reader=effect.reader, queue_id=queue_id, ended=result is not None, gateway=bound_to, produced=produced)
        return located, _Answer(tokens, pieces, result, logprobs)

    async def _attached(self, effect: Attach, gateway: str) -> Attached:
        """Reads token ids from the offset on, and text from its beginning: only earlier pieces show where one begins. Raises
        OffsetOutOfRange, in bytes."""
        try:
            attached = await self._queue.attach(effect.key, gateway, effect.offset * TOKEN_BYTES)
        except OffsetOutOfRange:
            # Short pieces of text take less than a token.
            attached = await self._queue.attach(effect.key, "", 0)
            if not _is_text(attached):
                raise
            return await self._queue.attach(effect.key, gateway, 0)
        if effect.offset and _is_text(attached):
            return await self._queue.attach(effect.key, gateway, 0)
        return attached

    async def _tokens_before(self, effect: Attach, model: str) -> Sequence[int]:
        """The tokens on which the text of the first ones may depend; models without a tokenizer need none."""
        text = self._texts.get(model)
        if effect.offset == 0 or text is None or not text.exact:
            return ()
        start = max(0, effect.offset - CONTEXT_TOKENS)
        earlier = await self._queue.attach(effect.key, "", start * TOKEN_BYTES)
        return tokens_of(earlier.progress)[: effect.offset - start]

    def _locate_failed(self, reader: ReaderId, failure: AttachFailure, error: QlmError) -> None:
        stream = self._streams.get(reader)
        if stream is not None:
            stream.failure = error
        self._step(LocateFailed(reader=reader, failure=failure))

    # Frames and time --------------------------------------------------------------------------------------------------

    async def _read_frames(self) -> None:
        after = "0"
        while True:
            try:
                entries = await self._queue.read_frames(self.gateway, after, READ_BLOCK_S)
            except Unavailable as error:
                self._metrics.queue_away.labels("read_frames").inc()
                structlog.get_logger().warning("frames_not_read", error=str(error))
                await asyncio.sleep(READ_RETRY_S)
                continue
            frames_read = 0
            for entry in entries:
                after = entry.entry_id
                frames_read += self.on_batch(entry.payload)
                if frames_read >= FRAMES_PER_TURN_MAX:
                    frames_read = 0
                    await asyncio.sleep(0)

    def on_batch(self, payload: bytes) -> int:
        """Takes one entry of the frame stream; how many frames it had."""
        try:
            frames = FrameBatch.FromString(payload).frames
        except DecodeError:
            # One writer's bug must not end everybody's streams: those that miss these frames attach again.
            self._metrics.frames_unreadable.inc()
            structlog.get_logger().error("frames_unreadable", bytes=len(payload))
            return 0
        self._metrics.frames.inc(len(frames))
        self._step(FramesRead(frames=[frame_facts(frame) for frame in frames]))
        return len(frames)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Every `TICK_S`."""
        self._step(Tick())
        self._metrics.buffered_tokens.set(self._machine.buffered_tokens)


def _is_text(attached: Attached) -> bool:
    if attached.ended is not None:
        return bool(Result.FromString(attached.ended.result).output_pieces)
    return attached.live is not None and attached.live.text


def _model_of(live: LiveRequest | None) -> str:
    return "" if live is None else Request.FromString(live.body).model


def _in_tokens(error: OffsetOutOfRange) -> OffsetOutOfRange:
    """The queue counts bytes of progress, clients count tokens."""
    details = {name: str(int(value) // TOKEN_BYTES) for name, value in error.details.items() if value.isdecimal()}
    offset, produced = details.get("offset", "?"), details.get("produced", "?")
    return OffsetOutOfRange(f"offset {offset} is beyond the {produced} tokens produced so far", details=details)
