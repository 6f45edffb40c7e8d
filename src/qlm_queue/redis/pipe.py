"""Many calls on one connection: written together, answered in order.

A pool gives each call a connection of its own, and the client's streams wake a task to write and another to read; both cost several times
as much on the caller's side as the call itself. Here calls made in one turn of the event loop leave in one write, answers are taken where
the loop delivers their bytes, and one timer watches the oldest call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import hiredis
from redis import exceptions
from redis.asyncio.connection import AbstractConnection, DefaultParser

CALLS_MAX = 10_000
BYTES_MAX = 64 << 20
"""Bounds of the calls under way on one connection: their number, and bytes that wait to be written."""

_NOTHING_YET = object()


class Pipe(asyncio.Protocol):
    """A connected server. It breaks when the connection does, and is *worn* once a call on it was not answered in time: its other calls
    may still be answered, but new ones belong on a new connection."""

    def __init__(self, connection: AbstractConnection, call_timeout_s: float) -> None:
        self._connection = connection
        self._call_timeout_s = call_timeout_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._reader = hiredis.Reader(
            protocolError=exceptions.InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=_NOTHING_YET
        )
        self._under_way: deque[asyncio.Future[Any]] = deque()
        self._deadlines: deque[tuple[asyncio.Future[Any], float]] = deque()  # calls have one timeout, so they are overdue in their order
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._writing = False  # a write is due, or the transport takes no more for now
        self._timer: asyncio.TimerHandle | None = None
        self.worn = False
        self.broken = False
        self.reign = ""
        """Replication id of the server that takes writes: it changes when another takes its place, and never returns."""

    @property
    def host(self) -> str:
        """The server's, or "localhost" for a socket's."""
        return str(getattr(self._connection, "host", "localhost"))

    @property
    def idle(self) -> bool:
        """Nobody waits for an answer."""
        return not self._deadlines

    async def start(self) -> None:
        """Connects. Raises the client's errors."""
        task = asyncio.current_task()
        cancelled_before = task.cancelling() if task is not None else 0
        await self._connection.connect()  # type: ignore[no-untyped-call]
        if task is not None and task.cancelling() > cancelled_before:  # the client writes under `wait_for`, which loses it before 3.12
            raise asyncio.CancelledError
        # The client connects, authenticates and selects; from here on its streams would only be in the way.
        writer = self._connection._writer
        assert writer is not None, "it is connected"
        writer.transport.set_protocol(self)
        self._transport = writer.transport

    async def stop(self) -> None:
        """Closes the connection; calls under way raise ConnectionError. Safe unstarted and twice."""
        self._break(exceptions.ConnectionError("the connection was closed"))
        await self._connection.disconnect(nowait=True)

    def ask(self, *command: Any, within_s: float | None = None) -> asyncio.Future[Any]:
        """Sends a command; its answer arrives as the result. ResponseError for a refusal; ConnectionError and TimeoutError where it may or
        may not have happened; ConnectionError at once, and nothing is sent, on a broken pipe and beyond the bounds. `within_s`: a timeout
        of its own, for a call that has the pipe to itself."""
        if self.broken or self._transport is None:
            raise exceptions.ConnectionError("the connection is broken")
        if len(self._under_way) >= CALLS_MAX or self._unsent_bytes > BYTES_MAX:
            raise exceptions.ConnectionError(f"{len(self._under_way)} calls wait for the server, {self._unsent_bytes} bytes unsent")
        packed = hiredis.pack_command(command)  # six times as fast as the client's own: an `emit` has seven arguments for each token
        self._unsent.append(packed)
        self._unsent_bytes += len(packed)
        if not self._writing:
            self._writing = True
            self._loop.call_soon(self._write)
        answer: asyncio.Future[Any] = self._loop.create_future()
        deadline_s = self._loop.time() + (self._call_timeout_s if within_s is None else within_s)
        self._under_way.append(answer)
        self._deadlines.append((answer, deadline_s))
        if self._timer is None or self._timer.when() > deadline_s:
            self._set_timer(deadline_s)
        return answer

    # asyncio.Protocol -------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (answer := self._reader.gets()) is not _NOTHING_YET:
                self._answered(answer)
        except (exceptions.RedisError, IndexError) as error:  # not the protocol, or an unrequested answer
            self._break(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(exc or exceptions.ConnectionError("the server closed the connection"))

    def pause_writing(self) -> None:
        self._writing = True

    def resume_writing(self) -> None:
        self._write()

    # Inside -----------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        self._writing = False
        if self._unsent and self._transport is not None and not self.broken:
            parts, self._unsent, self._unsent_bytes = self._unsent, [], 0
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def _answered(self, answer: Any) -> None:
        future = self._under_way.popleft()
        if not future.done():  # else it was cancelled, or this is too late
            if isinstance(answer, exceptions.RedisError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        while self._deadlines and self._deadlines[0][0].done():
            self._deadlines.popleft()

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        while self._deadlines:
            future, deadline_s = self._deadlines[0]
            if deadline_s > now_s and not future.done():
                self._set_timer(deadline_s)
                return
            self._deadlines.popleft()
            if not future.done():
                self.worn = True
                future.set_exception(exceptions.TimeoutError("no answer in time"))

    def _break(self, error: Exception) -> None:
        if self.broken:
            return
        self.broken = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
        self._deadlines.clear()
        kind = exceptions.InvalidResponse if isinstance(error, exceptions.InvalidResponse) else exceptions.ConnectionError
        while self._under_way:
            future = self._under_way.popleft()
            if not future.done():
                future.set_exception(kind(str(error)))
