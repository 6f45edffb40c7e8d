"""The connection to the server: function calls and blocking reads with deadlines, and the errors they end in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio as redis
from redis import exceptions

from qlm_core.vocabulary.errors import LeaseLost, NotFound, OffsetOutOfRange, QueueFull, RequestIdConflict, Unavailable
from qlm_queue.bounds import bytes_full, requests_full
from qlm_queue.redis.address import ServerAddress
from qlm_queue.redis.pipe import Pipe
from qlm_queue.redis.scripts import LIBRARY_PREFIX, READING, Library, is_not_loaded

Answer = TypeVar("Answer")
Entry = tuple[bytes, dict[bytes, bytes]]
"""Id and fields of an entry of a stream."""

CONNECTIONS_MAX = 32
RETRY_AFTER_S = 1.0
# Refusals that pass: by code where the client leaves it in the message, by class where it takes it out.
_AWAY_CODES = frozenset({"MISCONF", "BUSY", "UNKILLABLE", "NOREPLICAS"})
_AWAY_ERRORS = (exceptions.OutOfMemoryError, exceptions.NoPermissionError)
# Refusals of a server that may not be the queue's any more. ASK is among them: while the slot of a queue moves, no server has all keys.
_ELSEWHERE_ERRORS = (exceptions.ReadOnlyError, exceptions.AskError, exceptions.TryAgainError, exceptions.ClusterDownError)
_FAILURES = (redis.ConnectionError, redis.TimeoutError, TimeoutError, OSError, redis.ResponseError, redis.InvalidResponse)


class RecordDamaged(Exception):
    """The server refuses a call because of what it holds (or of a bug of a script): not for the callers of the port."""


class _Typed(redis.Redis):
    """Forms the client's commands and reads their answers; they travel on the pipe."""

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        super().__init__(protocol=2)
        self._ask = ask

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        answer = await self._ask(*str(args[0]).split(), *args[1:])
        options.pop("keys", None)  # for the client's cache
        read = self.response_callbacks.get(args[0])
        return answer if read is None else read(answer, **options)


class RedisLink:
    """The server at an address, and one library of functions on it. Each connection is opened to the server that the address names then,
    and used only where that takes writes. Nothing is retried here: whether a call may be repeated is for its caller to say."""

    def __init__(
        self, address: ServerAddress, library: Library, call_timeout_s: float, on_open: Callable[[Pipe], Awaitable[None]] | None = None
    ) -> None:
        """`on_open`: is called with each connection before others use it; what it raises fails the call that opened it."""
        self._address = address
        self._library = library
        self._call_timeout_s = call_timeout_s
        self._on_open = on_open
        self._started = False
        self._typed = _Typed(self.ask)
        self._pipe: Pipe | None = None
        self._readers: set[Pipe] = set()  # each has one blocking read at a time
        self._idle_readers: list[Pipe] = []
        self._worn: list[Pipe] = []  # pipes that were given up and may still wait for answers
        self._opening = asyncio.Lock()
        self.connections = 0
        """Pipes opened so far: another one may be to a server that was started anew."""
        self.reign = ""
        """`Pipe.reign` of the server that the last connection was opened to."""

    async def start(self) -> None:
        """Connects, loads the library and deletes those of other builds: a process of one that still runs loads its own again. Raises
        Unavailable, and what `on_open` raises."""
        if self._started:
            return
        self._started = True
        try:
            await self._load_library()
            await self._delete_other_libraries()
        except BaseException:
            await self.stop()
            raise

    async def open(self) -> None:
        """Opens the connection that calls go on. Raises Unavailable, and what `on_open` raises."""
        await self._within(self._call_timeout_s, self._opened)

    async def stop(self) -> None:
        self._started = False
        async with self._opening:  # one that opens a pipe just now finishes first
            pipes = [*self._worn, *([] if self._pipe is None else [self._pipe]), *self._readers]
            self._pipe, self._worn, self._readers, self._idle_readers = None, [], set(), []
            for pipe in pipes:
                await pipe.stop()

    @property
    def connected(self) -> bool:
        """The next call uses the connection of the last one, as far as is known."""
        return self._pipe is not None and not self._pipe.worn and not self._pipe.broken

    @property
    def local(self) -> bool:
        """The server is on this machine, or seems so: it is reached by a socket or the loopback."""
        host = "" if self._pipe is None else self._pipe.host
        return host in {"localhost", "::1"} or host.startswith("127.")

    @property
    def client(self) -> redis.Redis:
        """For plain commands through `run`."""
        return self._typed

    async def run(self, command: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """One command of `client`. Raises Unavailable where it may or may not have happened, RecordDamaged for another type."""
        return await command(*args, **options)

    async def ask(self, *command: Any) -> Any:
        """One command, answered as the server writes it: a fraction of what `run` costs. Raises as `run`."""
        return await self._ask(command)

    async def call(self, name: str, keys: list[str], args: list[Any], within_s: float | None = None) -> Any:
        """One function of the library; loads the library again where a restarted server has lost it. `within_s`: a deadline below the
        call timeout."""
        command = ("FCALL_RO" if name in READING else "FCALL", self._library.function(name), len(keys), *keys, *args)
        try:
            try:
                return await self._ask(command, within_s)
            except redis.ResponseError as error:
                if not is_not_loaded(str(error)):
                    raise
            await self._load_library()
            return await self._ask(command, within_s)
        except redis.ResponseError as error:
            raise _qlm_error(error) from error

    async def _load_library(self) -> None:
        """Only where it is not there: a full server takes no other."""
        if not await self.run(self.client.function_list, self._library.name):
            await self.run(self.client.function_load, self._library.code, True)

    async def _delete_other_libraries(self) -> None:
        for answer in await self.run(self.client.function_list, f"{LIBRARY_PREFIX}*"):
            name = answer[1].decode()
            if name != self._library.name:
                with contextlib.suppress(redis.ResponseError):  # another process was first
                    await self.run(self.client.function_delete, name)

    async def _ask(self, command: tuple[Any, ...], within_s: float | None = None) -> Any:
        """One command on the pipe, within its deadline or the call timeout. After a deadline of its own the pipe is worn, as by any call
        that is not answered in time: where answers are lost without a word, another connection is tried."""
        pipe = self._pipe
        try:
            if within_s is not None and within_s < self._call_timeout_s:
                pipe = None
                async with asyncio.timeout(within_s):
                    pipe = await self._opened()
                    return await pipe.ask(*command)
            if pipe is not None and self.connected:
                return await pipe.ask(*command)
            async with asyncio.timeout(self._call_timeout_s):
                pipe = await self._opened()
                return await pipe.ask(*command)
        except _FAILURES as error:
            soon = within_s is not None and isinstance(error, TimeoutError)
            if pipe is not None and (soon or isinstance(error, _ELSEWHERE_ERRORS)):
                pipe.worn = True
            raise _unavailable(error) or error from error

    async def _opened(self) -> Pipe:
        """A pipe for new calls. Those that nobody waits for any more are closed."""
        async with self._opening:
            if not self._started:
                raise redis.ConnectionError("the queue is not started")
            if self._pipe is not None and self.connected:
                return self._pipe
            if self._pipe is not None:
                self._worn.append(self._pipe)
                self._pipe = None
            for pipe in [pipe for pipe in self._worn if pipe.broken or pipe.idle]:
                self._worn.remove(pipe)
                await pipe.stop()
            self._pipe = await self._new_pipe()
            return self._pipe

    async def _new_pipe(self) -> Pipe:
        self.connections += 1
        pipe = Pipe(await self._address.connection(), self._call_timeout_s)
        try:
            await pipe.start()
            pipe.reign = await reign_of(pipe)
            if self._on_open is not None:
                await self._on_open(pipe)
        except BaseException:
            await pipe.stop()
            raise
        if pipe.reign != self.reign:
            self.reign = pipe.reign
            self.rediscover()
        return pipe

    async def companion(self) -> Pipe:
        """Another connection to the server, for its opener to stop. Raises Unavailable."""

        async def opened() -> Pipe:
            async with self._opening:
                return await self._new_pipe()

        return await self._within(self._call_timeout_s, opened)

    def rediscover(self) -> None:
        """The next call opens a connection to the server that the address names then."""
        if self._pipe is not None:
            self._pipe.worn = True

    async def read_streams(self, stream: str, after: str, block_s: float, count: int) -> list[Entry]:
        """Entries of a stream after an id, waiting up to `block_s`."""
        return await self._read(block_s, ("XREAD", "COUNT", count), ("STREAMS", stream, after))

    async def read_group(self, stream: str, group: str, consumer: str, block_s: float, count: int) -> list[Entry]:
        """Entries that nobody of the consumer group has read yet."""
        return await self._read(block_s, ("XREADGROUP", "GROUP", group, consumer, "COUNT", count), ("STREAMS", stream, ">"))

    async def _read(self, block_s: float, command: tuple[Any, ...], streams: tuple[str, ...]) -> list[Entry]:
        block = ("BLOCK", max(1, round(block_s * 1000))) if block_s > 0 else ()
        within_s = block_s + self._call_timeout_s
        reader = None
        try:
            async with asyncio.timeout(self._call_timeout_s):
                reader = await self._idle_reader()
            answer = await reader.ask(*command, *block, *streams, within_s=within_s)
        except redis.ResponseError as error:
            if isinstance(error, _ELSEWHERE_ERRORS):
                self.rediscover()
            self._done_with(reader)
            raise _unavailable(error) or error from error
        except BaseException as error:  # also when cancelled: it may still wait on the server, and the next read behind it
            if reader is not None:
                self._readers.discard(reader)
                await reader.stop()
            if isinstance(error, _FAILURES):
                raise _unavailable(error) or error from error
            raise
        self._done_with(reader)
        if not answer:
            return []
        ((_, entries),) = answer
        return [(entry_id, dict(zip(fields[::2], fields[1::2], strict=True))) for entry_id, fields in entries if fields is not None]

    async def _idle_reader(self) -> Pipe:
        while self._idle_readers:
            reader = self._idle_readers.pop()
            if not reader.broken and reader.reign == self.reign:
                return reader
            self._readers.discard(reader)
            await reader.stop()
        async with self._opening:  # one at a time, or there could be more than allowed, or one that `stop` does not see
            if len(self._readers) >= CONNECTIONS_MAX:
                raise redis.ConnectionError(f"{CONNECTIONS_MAX} reads wait on the server already")
            reader = await self._new_pipe()
            self._readers.add(reader)
            return reader

    def _done_with(self, reader: Pipe | None) -> None:
        if reader is not None and reader in self._readers:
            self._idle_readers.append(reader)

    async def _within(self, timeout_s: float, start: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                return await start()
        except _FAILURES as error:
            raise _unavailable(error) or error from error


async def reign_of(pipe: Pipe) -> str:
    """See `Pipe.reign`. Raises ReadOnlyError for a server that takes no writes of its own."""
    found = dict(line.split(":", 1) for line in (await pipe.ask("INFO", "replication")).decode().split("\r\n") if ":" in line)
    if found["role"] != "master":
        raise exceptions.ReadOnlyError("the server is a replica, and takes no writes of its own")
    return str(found["master_replid"])


def _unavailable(error: Exception) -> Exception | None:
    """The error for a server that is away, refuses for now or holds what it should not; None for another refusal."""
    details = {"retry_after_s": f"{RETRY_AFTER_S}"}
    if not isinstance(error, redis.ResponseError):
        return Unavailable(f"the queue's server is away: {str(error) or repr(error)}", details=details)
    if str(error).startswith("WRONGTYPE"):
        return RecordDamaged(f"the queue's server refuses: {error}")
    if isinstance(error, (*_AWAY_ERRORS, *_ELSEWHERE_ERRORS)) or str(error).partition(" ")[0] in _AWAY_CODES:
        return Unavailable(f"the queue's server refuses: {error}", details=details)
    return None


def _queue_full(bound: str, limit: str, held: str = "", frees_after_ms: str = "") -> QueueFull:
    if held:
        return bytes_full(bound, int(limit), int(held), int(frees_after_ms) / 1000 if frees_after_ms else None)
    return requests_full(bound, int(limit))


def _qlm_error(error: redis.ResponseError) -> Exception:
    code, _, rest = str(error).partition(" ")
    match code:
        case "QLMLEASE":
            return LeaseLost(rest)
        case "QLMNOTFOUND":
            return NotFound(rest)
        case "QLMCONFLICT":
            return RequestIdConflict(rest)
        case "QLMFULL":
            return _queue_full(*rest.split())
        case "QLMOFFSET":
            return OffsetOutOfRange("the offset is beyond what was produced", details={"produced": rest})
        case _:
            return RecordDamaged(f"a script of the queue failed: {error}")
