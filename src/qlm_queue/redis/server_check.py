"""Whether a server keeps what it acknowledges, and has room for it: at the start, at each reconnect, and while it is used."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis.asyncio as redis
import structlog
from redis import exceptions

from qlm_core.vocabulary.errors import ConfigError, QlmError, QueueFull, Unavailable
from qlm_core.vocabulary.request import RequestKey
from qlm_queue.keys import Keys
from qlm_queue.redis.link import RETRY_AFTER_S, RedisLink
from qlm_queue.values import Bounds, Durability

LOOK_EVERY_S = 0.5
"""An older check of the server is repeated before a request is accepted."""

REWRITE_GAP_S = 10.0
"""Between two rewrites of the server's log that one process begins."""

_APPENDFSYNC_ALLOWED = {Durability.PROCESS: ("no", "always"), Durability.DISK: ("always",), Durability.REPLICA: ("no", "always")}
_SETTINGS = (
    "appendonly", "appendfsync", "stream-node-max-entries", "maxmemory", "maxmemory-policy", "save", "stop-writes-on-bgsave-error", "dir",
    "appenddirname",
)  # fmt: skip
REPLICA_LAG_MAX_S = 2
"""Replicas report each second: one that missed two reports is not counted."""

_SECTIONS = ("replication", "persistence", "memory")
_LOG_FAILED = "the server cannot write its log of writes (see its own log): what it acknowledges may be lost"
_LOG_UNWRITTEN = b"aof_last_write_status:err"

_LOG_GONE = "the folder of the server's log of writes is gone: a server that starts again has nothing"


@contextmanager
def refusals_are_config_errors() -> Iterator[None]:
    """Turns permanent refusals of a server into ConfigError: a wrong password, a database or a protocol that it does not have, data of
    another version."""
    try:
        yield
    except redis.ResponseError as error:
        raise ConfigError(f"queue.url: the server refuses it: {error}") from error
    except Unavailable as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, (redis.AuthenticationError, redis.InvalidResponse, exceptions.NoPermissionError)):
            raise ConfigError(f"queue.url: the server refuses it: {error.__cause__}") from error
        raise


def info_of(answer: bytes) -> dict[str, Any]:
    """The fields of an INFO; numbers as int, and what it says of each replica by name."""
    fields = (line.partition(":") for line in answer.decode().splitlines())
    return {name: int(value) if value.isdecimal() else _parts(value) for name, colon, value in fields if colon}


def _parts(value: str) -> str | dict[str, str]:
    return dict(part.split("=", 1) for part in value.split(",")) if value.startswith("ip=") else value


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


def replicas_problem(info: Mapping[str, Any], replicas: int) -> str:
    """Why nothing would be confirmed by this many replicas, "" if they are there."""
    replies = (info.get(f"slave{number}", {}) for number in range(int(info.get("connected_slaves", 0))))
    there = sum(each.get("state") == "online" and int(each.get("lag", 0)) <= REPLICA_LAG_MAX_S for each in replies)
    return f"the server has {there} replicas that follow it, and queue.replicas is {replicas}" if there < replicas else ""


def full_bound(info: Mapping[str, Any], free_bytes: int | None, bounds: Bounds) -> tuple[str, int, int] | None:
    """Finds the resource of a server that is used above its share, with limit and use in bytes. `free_bytes`: of the log's disk, None
    where it is not known."""
    limit, held = round(int(info.get("maxmemory", 0)) * bounds.memory_share), int(info["used_memory"])
    if limit and held >= limit:
        return "memory", limit, held
    held = int(info.get("aof_current_size", 0))
    if free_bytes is not None and held > (limit := math.ceil((held + free_bytes) * bounds.disk_share)):
        return "disk", limit, held
    return None


def rewrite_helps(info: Mapping[str, Any], free_bytes: int, bounds: Bounds) -> bool:
    """The log is above its share of the disk, a new one takes at most half of its bytes, and fits beside it. It takes no more than the data
    in memory."""
    log_bytes, data_bytes = int(info.get("aof_current_size", 0)), int(info.get("used_memory_dataset", 0))
    above = log_bytes > (log_bytes + free_bytes) * bounds.disk_share
    under_way = info.get("aof_rewrite_in_progress") or info.get("aof_rewrite_scheduled")
    return above and log_bytes >= 2 * data_bytes and free_bytes > data_bytes and not under_way


class ServerWatch:
    """Watches a server. Nothing is accepted above `bounds.memory_share` of its maxmemory, nor where its log takes more than
    `bounds.disk_share` of the disk that it has: the rest is for leases, progress and results of accepted requests, and for a rewrite of the
    log, which a check begins at that bound. The disk is seen where the server is on this machine. The watch remembers what the server
    acknowledged to this process, and notices a server that returned without it: by the number of acceptances, and after a reconnect by the
    last request that this process had accepted."""

    def __init__(self, link: RedisLink, keys: Keys, durability: Durability, replicas: int, bounds: Bounds) -> None:
        self._link = link
        self._keys = keys
        self._durability = durability
        self._replicas = replicas if durability is Durability.REPLICA else 0
        self._bounds = bounds
        self._newest: tuple[RequestKey, float] | None = None  # accepted last, and when
        self._last: tuple[RequestKey, float] | None = None  # the same, of the connection that was checked last
        self._loss = ""
        self._lost_s = 0.0
        self.accepted_count = 0
        """Most acceptances that the server has counted, as far as this process knows."""
        self._polling = asyncio.Lock()
        self._seen_s = 0.0
        self._seen_connections = 0
        self._refusal: QlmError | None = None
        self._hidden = False  # a managed server that shows no settings
        self._rewritten_s = -math.inf
        self._log_seen: Path | None = None

    async def start(self) -> None:
        """Raises ConfigError where the server does not keep the durability; warns where its streams would grow under deletes from the
        middle, and where a managed server hides its settings."""
        log = structlog.get_logger()
        found: Mapping[str, str] = {}
        try:
            found = await self._settings()
        except (redis.ResponseError, Unavailable) as error:
            if isinstance(error, Unavailable) and not isinstance(error.__cause__, exceptions.NoPermissionError):
                raise
            self._hidden = True
            log.warning("queue_server_settings_hidden", error=str(error), durability=self._durability.value)
        if not self._hidden and (problem := settings_problem(found, self._durability)):
            raise ConfigError(problem)
        if not self._hidden and found.get("stream-node-max-entries") != "1":
            log.warning("queue_server_streams_not_compact", setting="stream-node-max-entries", wanted="1")

    async def refusal(self) -> QlmError | None:
        """Why nothing is accepted now, None if it is. Raises Unavailable."""
        if self._stale:
            async with self._polling:
                if self._stale:
                    await self._poll()
        return self._refusal

    @property
    def loss(self) -> str:
        """Describes acknowledged writes that the server lost, as noticed within the window of results; "" for none."""
        return self._loss if time.monotonic() - self._lost_s < self._bounds.result_ttl_s else ""

    def acknowledged(self, key: RequestKey, before: int, number: int) -> None:
        """A request was accepted as this acceptance, in a call that began when `accepted_count` was `before`."""
        self.counted(before, number - 1)
        self.accepted_count = max(self.accepted_count, number)  # by now replicas have it, too
        self._newest = (key, time.monotonic())
        if self._link.connections == self._seen_connections:  # else the one before is still to be checked
            self._last = self._newest

    def counted(self, before: int, found: int, *, lasting: bool = False) -> None:
        """The server has counted `found` acceptances, read when `accepted_count` was `before`. `lasting`: as its replicas have."""
        if found < before:
            self._lose(f"it counts {found} acceptances, and has counted {before}", found)
        if lasting or not self._replicas:  # else the last ones may be lost with the server, before their clients had an answer
            self.accepted_count = max(self.accepted_count, found)

    async def confirm(self) -> None:
        """Confirms that all earlier answers are in the server's log of writes, as far as it can say; else raises Unavailable. The server
        answers a write also where it fails to log it."""
        if _LOG_UNWRITTEN in await self._link.ask("INFO", "persistence"):
            raise Unavailable(_LOG_FAILED, details={"retry_after_s": f"{RETRY_AFTER_S}"})

    @property
    def _stale(self) -> bool:
        anew = not self._link.connected or self._link.connections != self._seen_connections
        return anew or time.monotonic() - self._seen_s >= LOOK_EVERY_S

    async def _settings(self) -> Mapping[str, str]:
        flat: list[bytes] = await self._link.ask("CONFIG", "GET", *_SETTINGS)
        return {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)}

    async def _poll(self) -> None:
        connections, seen_s = self._link.connections, time.monotonic()
        details = {"retry_after_s": f"{RETRY_AFTER_S}"}
        found = {} if self._hidden else await self._settings()
        problem = "" if self._hidden else settings_problem(found, self._durability)
        info = info_of(await self._link.ask("INFO", *_SECTIONS))
        free_bytes, gone = await asyncio.to_thread(self._disk_of_log, found) if self._link.local else (None, False)
        problem = problem or writes_problem(found, info) or (_LOG_GONE if gone else "") or replicas_problem(info, self._replicas)
        await self._check_loss(reconnected=connections != self._seen_connections)
        refusal: QlmError | None = Unavailable(f"nothing is accepted: {problem}", details=details) if problem else None
        if refusal is None and (full := full_bound(info, free_bytes, self._bounds)):
            bound, limit, held = full
            text = f"the queue is full: its server uses {held} bytes of {bound}, and {limit} is the bound"
            refusal = QueueFull(text, details={"bound": bound, "limit": str(limit), "held": str(held), **details})
        if free_bytes is not None:
            await self._rewrite_log(info, free_bytes)
        if str(refusal or "") and type(refusal) is not type(self._refusal):
            structlog.get_logger().error("queue_refuses", reason=str(refusal))
        self._refusal, self._seen_s, self._seen_connections = refusal, seen_s, connections

    def _disk_of_log(self, found: Mapping[str, str]) -> tuple[int | None, bool]:
        """Free bytes of the disk that the server's log is on, None where it is not known, and whether its folder was there and is gone."""
        log = Path(found.get("dir", "")) / found.get("appenddirname", "")
        try:
            free_bytes = shutil.disk_usage(log.parent).free
            there = log.is_dir()
        except FileNotFoundError:  # or of another machine, behind a forwarded port
            free_bytes, there = None, False
        except OSError:  # not for our eyes
            return None, False
        self._log_seen = log if there else self._log_seen
        return free_bytes, log == self._log_seen and not there

    async def _rewrite_log(self, info: Mapping[str, Any], free_bytes: int) -> None:
        """A server rewrites its log by its own settings, which know nothing of the disk."""
        if not rewrite_helps(info, free_bytes, self._bounds) or time.monotonic() - self._rewritten_s < REWRITE_GAP_S:
            return
        self._rewritten_s = time.monotonic()
        try:
            await self._link.run(self._link.client.bgrewriteaof)
        except (redis.ResponseError, Unavailable) as error:
            structlog.get_logger().warning("queue_log_not_rewritten", error=str(error))
        else:
            structlog.get_logger().info("queue_log_rewritten", log_bytes=info["aof_current_size"], free_bytes=free_bytes)

    async def _check_loss(self, *, reconnected: bool) -> None:
        before, last = self.accepted_count, self._last
        number: bytes | None = await self._link.ask("GET", self._keys("acceptance"))
        self.counted(before, int(number) if number is not None and number.isdigit() else 0)
        if reconnected and last is not None and time.monotonic() - last[1] < self._bounds.result_ttl_s:
            key = last[0]
            if not await self._link.ask("EXISTS", self._keys.request(key), self._keys.result(key)):
                self._lose("it has no record of the last request that it acknowledged to this process", self.accepted_count)
        self._last = self._newest

    def _lose(self, reason: str, accepted_count: int) -> None:
        """Remembers it, once: what the server has from now on is what it may lose."""
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        self._loss = f"the server has lost acknowledged requests ({reason}), as seen at {now} UTC"
        self._lost_s, self.accepted_count = time.monotonic(), accepted_count
        self._last = self._newest = None
        structlog.get_logger().error("queue_lost_requests", reason=reason)
