"""One engine for many tests, each of which has an event loop of its own: the engine lives in a thread with one that lasts.

For engines that take long to start. A test starts it (or finds it started) and stops it, by which its runs end; the engine's
processes end with this one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from qlm_agent.engine import Engine, EngineOutput, EngineRequest, EngineStats, Tier

Answer = TypeVar("Answer")
STOP_S = 60.0


class SharedEngine:
    """See `qlm_agent.engine.Engine`."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._loop = asyncio.new_event_loop()
        self._runs: list[str] = []
        self._reading: Future[Sequence[EngineOutput]] | None = None
        threading.Thread(target=self._loop.run_forever, name="shared-engine", daemon=True).start()

    @property
    def tells_text(self) -> bool:
        return self._started.tells_text

    @property
    def _started(self) -> Engine:
        assert self._engine is not None, "it was not started"
        return self._engine

    async def start(self) -> None:
        if self._engine is None:
            self._engine = await self._there(self._made())

    async def stop(self) -> None:
        if self._engine is None:
            return
        await self._there(self._started.resume())
        await self.abort(self._runs)
        self._runs = []
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()

    def tier(self, model: str) -> Tier:
        return self._now(lambda: self._started.tier(model))

    def stats(self) -> EngineStats:
        return self._now(lambda: self._started.stats())

    async def load_model(self, model: str, tier: Tier) -> float:
        return await self._there(self._started.load_model(model, tier))

    async def add(self, request: EngineRequest) -> None:
        self._runs.append(request.run_id)
        await self._there(self._started.add(request))

    async def abort(self, run_ids: Sequence[str]) -> None:
        await self._there(self._started.abort(run_ids))

    async def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        return await self._there(self._started.offload(run_ids))

    async def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        return await self._there(self._started.restore(run_ids))

    async def outputs(self) -> Sequence[EngineOutput]:
        """Who is cancelled while he waits loses nothing: the next one goes on waiting for the same."""
        if self._reading is None:
            self._reading = asyncio.run_coroutine_threadsafe(self._started.outputs(), self._loop)
        made = await asyncio.shield(asyncio.wrap_future(self._reading))
        self._reading = None
        return made

    async def pause(self) -> None:
        await self._there(self._started.pause())

    async def resume(self) -> None:
        await self._there(self._started.resume())

    async def _made(self) -> Engine:
        engine = self._make()
        await engine.start()
        return engine

    async def _there(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _now(self, ask: Callable[[], Answer]) -> Answer:
        async def asked() -> Answer:
            return ask()

        return asyncio.run_coroutine_threadsafe(asked(), self._loop).result(STOP_S)
