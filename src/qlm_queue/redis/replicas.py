"""Durability `replica`: an answer is given when enough replicas have what it rests on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import redis.asyncio as redis

from qlm_core.vocabulary.errors import Unavailable
from qlm_queue.redis.link import RETRY_AFTER_S, RedisLink, reign_of
from qlm_queue.redis.pipe import Pipe

_FAILURES = (redis.RedisError, OSError, TimeoutError, Unavailable)


class ReplicaBarrier:
    """Waits for replicas on a connection of its own, since WAIT holds up what is behind it. One WAIT covers all that the server did before,
    so calls that arrive while one is under way share the next."""

    def __init__(self, link: RedisLink, mark: Sequence[Any], replicas: int, wait_s: float) -> None:
        """`mark`: a command that writes; its answer is a number."""
        self._link = link
        self._mark = tuple(mark)
        self._replicas = replicas
        self._wait_s = wait_s
        self._pipe: Pipe | None = None
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[tuple[str, int]] | None = None  # not begun
        self._rounds: set[asyncio.Task[tuple[str, int]]] = set()

    async def confirm(self, reign: str) -> int:
        """Returns the answer to a mark, once `replicas` replicas have it and with that all that the server of this reign (`Pipe.reign`) has
        answered before this call. Raises Unavailable where they do not within `wait_s`, and where another server has taken its place:
        what was answered may then be lost."""
        if self._next is None:
            self._next = asyncio.create_task(self._round(), name="replicas")
            self._rounds.add(self._next)
            self._next.add_done_callback(self._ended)
        found, answer = await asyncio.shield(self._next)
        if not found == reign == self._link.reign:
            self._link.rediscover()
            raise _unconfirmed("another server has taken the place of the one that answered")
        return answer

    async def stop(self) -> None:
        """Cancels confirmations that are under way. Safe twice."""
        rounds = list(self._rounds)
        for each in rounds:
            each.cancel()
        if rounds:
            await asyncio.wait(rounds)
        await self._drop_pipe()

    def _ended(self, ended: asyncio.Task[tuple[str, int]]) -> None:
        self._rounds.discard(ended)
        if self._next is ended:  # cancelled before it began
            self._next = None
        if not ended.cancelled():
            ended.exception()  # also where nobody waits any more

    async def _round(self) -> tuple[str, int]:
        """The reign during which replicas confirmed, and the answer to the mark."""
        async with self._one_at_a_time:
            self._next = None  # calls that arrive from here on need the next one
            try:
                return await self._waited()
            except _FAILURES as error:
                await self._drop_pipe()
                self._link.rediscover()
                if isinstance(error, Unavailable):
                    raise
                raise _unconfirmed(str(error) or repr(error)) from error

    async def _waited(self) -> tuple[str, int]:
        if self._pipe is None or self._pipe.broken or self._pipe.worn or self._pipe.reign != self._link.reign:
            await self._drop_pipe()
            self._pipe = await self._link.companion()
        pipe = self._pipe
        waiting = ("WAIT", self._replicas, max(1, round(self._wait_s * 1000)))
        answer, reached, reign = await asyncio.gather(pipe.ask(*self._mark), pipe.ask(*waiting), reign_of(pipe))
        if reached < self._replicas:
            raise _unconfirmed(f"{reached} of {self._replicas} replicas confirmed within {self._wait_s:g} s")
        return reign, int(answer)

    async def _drop_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                await pipe.stop()


def _unconfirmed(reason: str) -> Unavailable:
    return Unavailable(f"not confirmed by the replicas, so it may not last: {reason}", details={"retry_after_s": f"{RETRY_AFTER_S}"})
