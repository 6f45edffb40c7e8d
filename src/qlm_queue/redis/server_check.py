"""Whether a server keeps what it acknowledges, and has room for it: at the start, at each reconnect, and while it is used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import redis.asyncio as redis
import structlog

from qlm_core.errors import ConfigError, QlmError, QueueFull, Unavailable
from qlm_core.request import RequestKey
from qlm_queue.keys import Keys
from qlm_queue.redis.link import RETRY_AFTER_S, RedisLink
from qlm_queue.values import Bounds, Durability

LOOK_EVERY_S = 0.5
"""An older look at the server is repeated before a request is accepted."""

_APPENDFSYNC_ALLOWED = {Durability.PROCESS: ("no", "always"), Durability.DISK: ("always",)}
_SETTINGS = (
    "appendonly", "appendfsync", "stream-node-max-entries", "maxmemory", "maxmemory-policy", "save", "stop-writes-on-bgsave-error",
)  # fmt: skip
_LOG_FAILED = "the server cannot write its log of writes (see its own log): what it acknowledges may be lost"


@contextmanager
def refusals_are_config_errors() -> Iterator[None]:
    """Of a server that answers, but never will to these settings: a wrong password, a database or a protocol that it does not have, data of
    another version."""
    try:
        yield
    except redis.ResponseError as error:
        raise ConfigError(f"queue.url: the server refuses it: {error}") from error
    except Unavailable as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, (redis.AuthenticationError, redis.InvalidResponse)):
            raise ConfigError(f"queue.url: the server refuses it: {error.__cause__}") from error
        raise


def settings_problem(found: Mapping[str, str], durability: Durability) -> str:
    """Why a server of these settings may lose acknowledged requests, "" if it does not."""
    allowed = _APPENDFSYNC_ALLOWED[durability]
    if found.get("appendonly") != "yes" or found.get("appendfsync") not in allowed:
        return (
            f"queue.durability {durability.value!r} needs a server with appendonly yes and appendfsync {' or '.join(allowed)}; "
            f"it has appendonly {found.get('appendonly')} and appendfsync {found.get('appendfsync')}"
        )
    policy = found.get("maxmemory-policy", "noeviction")
    if found.get("maxmemory", "0") != "0" and policy != "noeviction":
        return f"a queue needs a server with maxmemory-policy noeviction; it has {policy}, which deletes requests where memory is short"
    return ""


def writes_problem(found: Mapping[str, str], info: Mapping[str, Any]) -> str:
    """Why a server takes no writes, or may not keep them, by its settings (none where it hides them) and its INFO; "" if it does."""
    if info.get("role", "master") != "master":
        return "the server is a replica, and takes no writes of its own"
    if info.get("aof_last_write_status", "ok") != "ok":
        return _LOG_FAILED
    snapshots = found.get("save", "hidden") and found.get("stop-writes-on-bgsave-error", "yes") == "yes"
    if snapshots and info.get("rdb_last_bgsave_status", "ok") != "ok":
        return "the server's last snapshot failed (see its own log), and it takes no writes until one succeeds"
    return ""


class ServerWatch:
    """Looks at a server. `bounds.memory_share`: of its maxmemory, above which nothing is accepted: the rest is for leases, progress and
    results of what was accepted. It remembers what the server acknowledged to this process, and notices a server that came back without it:
    by the number of acceptances, and after a reconnect by the last request that this process had accepted."""

    def __init__(self, link: RedisLink, keys: Keys, durability: Durability, bounds: Bounds) -> None:
        self._link = link
        self._keys = keys
        self._durability = durability
        self._bounds = bounds
        self._newest: tuple[RequestKey, float] | None = None  # accepted last, and when
        self._last: tuple[RequestKey, float] | None = None  # the same, of the connection that was looked at last
        self._loss = ""
        self._lost_s = 0.0
        self.accepted_count = 0
        """Most acceptances that the server has counted, as far as this process knows."""
        self._looking = asyncio.Lock()
        self._seen_s = 0.0
        self._seen_connections = 0
        self._refusal: QlmError | None = None
        self._hidden = False  # a managed server that tells no settings
        self._confirming: asyncio.Task[None] | None = None
        self._confirming_next: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ConfigError where the server does not keep the durability; warns where its streams would grow under deletes from the
        middle, and where a managed server hides its settings."""
        log = structlog.get_logger()
        found: Mapping[str, str] = {}
        try:
            found = await self._settings()
        except redis.ResponseError as error:
            self._hidden = True
            log.warning("queue_server_settings_hidden", error=str(error), durability=self._durability.value)
        if not self._hidden and (problem := settings_problem(found, self._durability)):
            raise ConfigError(problem)
        if not self._hidden and found.get("stream-node-max-entries") != "1":
            log.warning("queue_server_streams_not_compact", setting="stream-node-max-entries", wanted="1")

    async def refusal(self) -> QlmError | None:
        """Why nothing is accepted now, None if it is. Raises Unavailable."""
        if self._stale:
            async with self._looking:
                if self._stale:
                    await self._look()
        return self._refusal

    @property
    def loss(self) -> str:
        """What the server has lost of what it acknowledged, as noticed within the window of results; "" for nothing."""
        return self._loss if time.monotonic() - self._lost_s < self._bounds.result_ttl_s else ""

    def acknowledged(self, key: RequestKey, before: int, number: int) -> None:
        """A request was accepted as this acceptance, in a call that began when `accepted_count` was `before`."""
        self.counted(before, number - 1)
        self.accepted_count = max(self.accepted_count, number)
        self._newest = (key, time.monotonic())
        if self._link.connections == self._seen_connections:  # else the one before is still to be looked for
            self._last = self._newest

    def counted(self, before: int, found: int) -> None:
        """The server has counted `found` acceptances, asked when `accepted_count` was `before`."""
        if found < before:
            self._lose(f"it counts {found} acceptances, and has counted {before}", found)
        self.accepted_count = max(self.accepted_count, found)

    async def confirm(self) -> None:
        """What the server answered before this call is in its log of writes, as far as it can say; else raises Unavailable. The server
        answers a write also where it fails to log it. Callers at the same time share a question."""
        if self._confirming_next is None:
            self._confirming_next = asyncio.create_task(self._ask_after(self._confirming), name="queue-confirm")
        await asyncio.shield(self._confirming_next)

    @property
    def _stale(self) -> bool:
        anew = not self._link.connected or self._link.connections != self._seen_connections
        return anew or time.monotonic() - self._seen_s >= LOOK_EVERY_S

    async def _settings(self) -> Mapping[str, str]:
        settings = await self._link.run(self._link.client.config_get, *_SETTINGS)
        return {_text(name): _text(value) for name, value in settings.items()}

    async def _look(self) -> None:
        connections, seen_s = self._link.connections, time.monotonic()
        details = {"retry_after_s": f"{RETRY_AFTER_S}"}
        found = {} if self._hidden else await self._settings()
        problem = "" if self._hidden else settings_problem(found, self._durability)
        info: Mapping[str, Any] = await self._link.run(self._link.client.info)
        problem = problem or writes_problem(found, info)
        await self._look_for_loss(reconnected=connections != self._seen_connections)
        refusal: QlmError | None = Unavailable(f"nothing is accepted: {problem}", details=details) if problem else None
        limit = round(int(info.get("maxmemory", 0)) * self._bounds.memory_share)
        if refusal is None and limit and int(info["used_memory"]) >= limit:
            text = f"the queue is full: its server uses {info['used_memory']} bytes of memory, and {limit} is the bound"
            refusal = QueueFull(text, details={"bound": "memory", "limit": str(limit), **details})
        if str(refusal or "") and type(refusal) is not type(self._refusal):
            structlog.get_logger().error("queue_refuses", reason=str(refusal))
        self._refusal, self._seen_s, self._seen_connections = refusal, seen_s, connections

    async def _look_for_loss(self, *, reconnected: bool) -> None:
        before, last = self.accepted_count, self._last
        number = await self._link.run(self._link.client.get, self._keys("acceptance"))
        self.counted(before, int(number) if number is not None and number.isdigit() else 0)
        if reconnected and last is not None and time.monotonic() - last[1] < self._bounds.result_ttl_s:
            key = last[0]
            if not await self._link.run(self._link.client.exists, self._keys.request(key), self._keys.result(key)):
                self._lose("it has no record of the last request that it acknowledged to this process", self.accepted_count)
        self._last = self._newest

    def _lose(self, reason: str, accepted_count: int) -> None:
        """Remembers it, once: what the server has from now on is what it may lose."""
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        self._loss = f"the server has lost acknowledged requests ({reason}), as seen at {now} UTC"
        self._lost_s, self.accepted_count = time.monotonic(), accepted_count
        self._last = self._newest = None
        structlog.get_logger().error("queue_lost_requests", reason=reason)

    async def _ask_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._confirming, self._confirming_next = self._confirming_next, None  # who comes from here on needs another answer
        info: Mapping[str, Any] = await self._link.run(self._link.client.info, "persistence")
        if info.get("aof_last_write_status", "ok") != "ok":
            raise Unavailable(_LOG_FAILED, details={"retry_after_s": f"{RETRY_AFTER_S}"})


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
