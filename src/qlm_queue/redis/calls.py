"""The calls of a queue on a server: their connection, what guards them, and what begins and ends with them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import redis.asyncio as redis
import structlog

from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_queue.damage import Damage, log_damage
from qlm_queue.keys import Keys
from qlm_queue.redis import answers
from qlm_queue.redis.address import ServerAddress
from qlm_queue.redis.link import RETRY_AFTER_S, RecordDamaged, RedisLink
from qlm_queue.redis.pipe import Pipe
from qlm_queue.redis.repair import repair_queue
from qlm_queue.redis.replicas import ReplicaBarrier
from qlm_queue.redis.scripts import Library, library_source
from qlm_queue.redis.server_check import ServerWatch, refusals_are_config_errors
from qlm_queue.values import Bounds, Durability, StepStatus, StreamEntry

Answer = TypeVar("Answer")

DATA_VERSION = 1
"""Version of the keys of `keys.py` and their content. It grows with a change that builds of the version before misread; a new key that
these leave alone is none."""

LASTING = frozenset(
    {"acquire_lease", "register", "accept", "attach", "cancel", "erase", "give_back", "complete", "find", "pause", "resume"}
)
"""Calls whose answers somebody outside hears, or forgets what is written by: at durability `replica` they wait for replicas. The caller
of others still has what they wrote, and notices that it is gone (`pull`, `emit`: STALE, GAP)."""

REPAIR_GAP_S = 1.0
"""Between two repairs of one process, which its calls began."""
CONSUMER_GROUP = "planner"


class RedisCalls:
    """`library`: other Lua source than the shipped one, `data_version`: that of another build, for tests."""

    def __init__(
        self,
        url: str,
        name: str = "default",
        *,
        durability: Durability = Durability.PROCESS,
        replicas: int = 1,
        replica_wait_s: float = 1.0,
        bounds: Bounds | None = None,
        call_timeout_s: float = 2.0,
        library: str | None = None,
        data_version: int = DATA_VERSION,
    ) -> None:
        self._name = name
        self._keys = Keys(name)
        self._bounds = bounds or Bounds()
        self._data_version = data_version
        functions = Library(library or library_source())
        self._link = RedisLink(ServerAddress(url, self._keys.prefix, call_timeout_s), functions, call_timeout_s, self._opened)
        self._watch = ServerWatch(self._link, self._keys, durability, replicas, self._bounds)
        self._barrier: ReplicaBarrier | None = None
        if durability is Durability.REPLICA:
            mark = ("FCALL", functions.function("mark"), 1, self._keys.prefix)
            self._barrier = ReplicaBarrier(self._link, mark, replicas, replica_wait_s)
        self._repair: asyncio.Task[None] | None = None
        self._repaired_s = -math.inf
        self._bound_args: list[Any] = [
            self._bounds.attempts_max,
            round(self._bounds.result_ttl_s * 1000),
            self._bounds.frames_max,
            round(self._bounds.frames_ttl_s * 1000),
            self._bounds.control_max,
            self._bounds.events_max,
            self._bounds.pulls_max,
        ]

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Raises Unavailable, and ConfigError for a server that refuses what the settings say, and for data of another version."""
        try:
            with refusals_are_config_errors():
                await self._link.start()
                await self._watch.start()
                await self._link.open()
                await self._make_consumer_group()
        except BaseException:
            await self.stop()
            raise

    async def _opened(self, pipe: Pipe) -> None:
        """Another server may be behind the url now. Raises Unavailable for data of another version."""
        try:
            await _agree_on_version(pipe.ask, self._keys("version"), self._name, self._data_version)
        except ConfigError as error:
            raise Unavailable(error.message, details={"retry_after_s": f"{RETRY_AFTER_S}"}) from error

    async def stop(self) -> None:
        repair, self._repair = self._repair, None
        if repair is not None:
            repair.cancel()
            await asyncio.wait([repair])
        if self._barrier is not None:
            await self._barrier.stop()
        await self._link.stop()

    async def repair(self, mend: bool) -> Sequence[Damage]:
        try:
            return await repair_queue(self._link, self._keys, self._ask, self._make_consumer_group, mend=mend)
        except RecordDamaged as error:  # damaged again meanwhile, or a bug: another repair follows
            raise Unavailable(f"the queue cannot be repaired: {error}") from error

    async def _call(
        self, function: str, *args: Any, read: Callable[[Any], Answer] = lambda answer: answer, within_s: float | None = None
    ) -> Answer:
        if function in LASTING:
            return await self._lasting(lambda: self._sound(lambda: self._ask(function, *args, within_s=within_s), read))
        return await self._sound(lambda: self._ask(function, *args, within_s=within_s), read)

    async def _lasting(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer of a call, once it is as durable as the level says. None and empty answers need nothing."""
        if self._barrier is None:
            return await call()
        if not self._link.connected:
            await self._link.open()
        reign, before = self._link.reign, self._watch.accepted_count
        answer = await call()
        if answer is not None and answer != []:
            self._watch.counted(before, await self._barrier.confirm(reign), lasting=True)
        return answer

    async def _ask(self, function: str, *args: Any, within_s: float | None = None) -> Any:
        return await self._link.call(function, [self._keys.prefix], [*self._bound_args, *args], within_s)

    async def _sound(self, ask: Callable[[], Awaitable[Any]], read: Callable[[Any], Answer] = lambda answer: answer) -> Answer:
        """The value of an answer. A damaged record fails the call as a server that is away does, and begins a repair: the caller tries
        again. The one guard of all calls."""
        try:
            return read(await ask())
        except RecordDamaged as error:
            reason: Exception = error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # of `read`
            reason = error
        structlog.get_logger().error("record_unreadable", error=repr(reason))
        if self._repair is None or self._repair.done():
            self._repair = asyncio.create_task(self._mend(), name="queue-repair")
        raise Unavailable(
            f"the queue holds a damaged record and is being repaired: {reason!r}", details={"retry_after_s": f"{RETRY_AFTER_S}"}
        )

    async def _mend(self) -> None:
        """A repair on its own, at most one at a time and some apart."""
        pause_s = self._repaired_s + REPAIR_GAP_S - time.monotonic()
        await asyncio.sleep(max(0.0, pause_s))
        try:
            log_damage(await self.repair(True))
        except Unavailable as error:
            structlog.get_logger().error("queue_not_repaired", error=str(error))
        self._repaired_s = time.monotonic()

    async def _steps(self, function: str, *args: Any) -> Sequence[StepStatus]:
        return await self._call(function, *args, read=answers.statuses)

    async def _read_stream(self, stream: str, field: bytes, after: str, block_s: float, count: int) -> Sequence[StreamEntry]:
        read = partial(answers.stream_entries, field)
        return await self._sound(lambda: self._link.read_streams(stream, after, block_s, count), read)

    async def _has_consumer_group(self) -> bool:
        try:
            groups = await self._link.run(self._link.client.xinfo_groups, self._keys("queue"))
        except redis.ResponseError:  # no stream yet
            return False
        return any(group["name"] == CONSUMER_GROUP.encode() for group in groups)

    async def _make_consumer_group(self) -> None:
        if await self._has_consumer_group():
            return  # without a write, which a full server refuses
        try:
            await self._link.run(self._link.client.xgroup_create, self._keys("queue"), CONSUMER_GROUP, "0", True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise


async def _agree_on_version(ask: Callable[..., Awaitable[Any]], key: str, queue_name: str, own: int) -> None:
    """Writes the version of this build into a queue that has none, or a damaged one. `ask`: makes one command, answered as the server gives
    it. Raises ConfigError for another version. A server that takes no writes now is tried again at the next connection."""
    try:
        stored: bytes | None = await ask("GET", key)
    except redis.ResponseError:  # of another type
        stored = b""
    try:
        if stored is None:
            stored = await ask("SET", key, own, "NX", "GET")  # another build may have been first
        elif not stored.isdigit():
            await ask("SET", key, own)
    except redis.ResponseError:
        return
    if stored is not None and stored.isdigit() and int(stored) != own:
        raise ConfigError(
            f"queue {queue_name!r} holds data of version {int(stored)} and this build uses version {own}: run a build of version "
            f"{int(stored)}, or give this one a queue of its own (queue.name)"
        )
