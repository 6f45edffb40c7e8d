"""Queues under test, each with the hooks that a test needs beside the port: a dump, and time that passes at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import redis.asyncio as redis

from qlm_core.vocabulary.request import RequestKey
from qlm_queue.keys import Keys
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.port import Queue
from qlm_queue.redis.answers import fixed_fields, kept_parts
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import Bounds
from queue_dump import QueueDump
from queue_dump_memory import dump_memory
from queue_dump_redis import dump_redis

LONG_AGO_MS = 1
FEW_MS = 3
CALL_TIMEOUT_S = 30.0
"""A machine that stands still for seconds, as that of a shared test run may, is not what these tests are about."""


@dataclass
class Clock:
    """The time of a memory queue: it stands still until it is moved."""

    now_s: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Subject(Protocol):
    """A queue and its hooks. The hooks change nothing but times."""

    queue: Queue

    async def dump(self) -> QueueDump: ...

    async def expire_lease(self, role: str) -> None:
        """The lease of a role or incarnation has run out."""

    async def expire_request(self, key: RequestKey) -> None:
        """The expiry of a live request that has one has passed."""

    async def expire_result(self, key: RequestKey) -> None:
        """The window of a terminal result is over."""

    async def pass_time(self) -> float:
        """Lets a few milliseconds of the queue's clock pass before and after the time that it returns."""

    async def leftovers(self) -> list[str]:
        """Keys of the queue that belong to a live request, a group or an owner."""


class MemorySubject:
    """The memory twin."""

    def __init__(self, name: str, bounds: Bounds) -> None:
        self.clock = Clock()
        self.memory = MemoryQueue(name, bounds, self.clock)
        self.queue: Queue = self.memory

    async def dump(self) -> QueueDump:
        return dump_memory(self.memory)

    async def expire_lease(self, role: str) -> None:
        self.memory.state.leases.pop(role, None)

    async def expire_request(self, key: RequestKey) -> None:
        state = self.memory.state
        request = state.by_key.get(key)
        if request is not None and request.expiry_s is not None:
            state.remove_expiry(request)
            request.expiry_s = LONG_AGO_MS / 1000
            state.add_expiry(request)

    async def expire_result(self, key: RequestKey) -> None:
        self.memory.state.forget(key)

    async def pass_time(self) -> float:
        self.clock.now_s += 2 * FEW_MS / 1000
        return self.clock.now_s - FEW_MS / 1000

    async def leftovers(self) -> list[str]:
        state = self.memory.state
        kept = {"requests": state.requests, "by_key": state.by_key, "by_number": state.by_number, "groups": state.groups}
        kept |= {"unplaced": state.unplaced, "expiries": state.expiries}
        counters = [*state.live_by_tenant.values(), *state.live_by_class.values()]
        owned = [name for name, requests in state.running.items() if requests]
        return [name for name, values in kept.items() if values] + owned + ["counters"] * any(counters)


_KEPT = re.compile(
    r"(result|fence|lease|ctl|frames):.+"
    r"|queue|kept|counts|vq_version|address|instances|registered|incarnations|events|acceptance|plan_version|profiles|paused|version",
    re.DOTALL,
)


class RedisSubject:
    """The Redis implementation on a real server."""

    def __init__(self, url: str, name: str, bounds: Bounds, library: str | None = None) -> None:
        self.queue: Queue = RedisQueue(url, name, bounds=bounds, library=library, call_timeout_s=CALL_TIMEOUT_S)
        self._keys = Keys(name)
        self._pattern = "".join(f"\\{letter}" if letter in "[]*?\\" else letter for letter in self._keys.prefix) + ":*"
        self.client = redis.Redis.from_url(url, protocol=2)

    async def stop(self) -> None:
        """Closes all connections and deletes the queue, since one server serves a whole session."""
        await self.queue.stop()
        names = await self.client.keys(self._pattern)
        if names:
            await self.client.unlink(*names)
        await self.client.aclose()

    async def dump(self) -> QueueDump:
        assert isinstance(self.queue, RedisQueue)
        return await dump_redis(self.queue)

    async def expire_lease(self, role: str) -> None:
        await self.client.delete(self._keys("lease", role))

    async def expire_request(self, key: RequestKey) -> None:
        fixed, expiry = await self.client.hmget(self._keys.request(key), ["f", "x"])
        if isinstance(fixed, bytes) and expiry is not None:
            queue_id = fixed_fields(fixed)[0]
            await self.client.hset(self._keys.request(key), "x", str(LONG_AGO_MS))
            await self.client.execute_command("ZADD", self._keys("expiry"), LONG_AGO_MS, queue_id)  # type: ignore[no-untyped-call]

    async def expire_result(self, key: RequestKey) -> None:
        await self.client.delete(self._keys.result(key))
        named = self._keys.result(key).removeprefix(self._keys("result", "")).encode()
        for member in await self.client.zrange(self._keys("kept"), 0, -1):
            if isinstance(member, bytes) and kept_parts(member)[-1] == named:
                await self.client.execute_command("ZADD", self._keys("kept"), LONG_AGO_MS, member)  # type: ignore[no-untyped-call]

    async def pass_time(self) -> float:
        middle_s = await self.queue.server_time_s() + FEW_MS / 1000
        while await self.queue.server_time_s() < middle_s + FEW_MS / 1000:
            pass
        return middle_s

    async def leftovers(self) -> list[str]:
        found: list[bytes] = await self.client.execute_command("KEYS", self._pattern)  # type: ignore[no-untyped-call]
        names = [name.decode()[len(self._keys.prefix) + 1 :] for name in found]
        left = [name for name in sorted(names) if not _KEPT.fullmatch(name)]
        counted: list[bytes] = await self.client.execute_command("HKEYS", self._keys("counts"))  # type: ignore[no-untyped-call]
        left += [field.decode() for field in counted if not field.startswith(b"b")]
        if await self.client.xlen(self._keys("queue")):
            left.append("entries in queue")
        if (await self.client.xpending(self._keys("queue"), "planner"))["pending"]:
            left.append("pending entries in queue")
        return left
