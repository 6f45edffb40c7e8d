"""Unread output: one output a run, however many were added."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from qlm_agent.engines.port import EngineOutput


class PendingOutputs:
    """`tell_every_s`: how long output waits for more; the first and the last of a run never wait."""

    def __init__(self, tell_every_s: float, clock: Callable[[], float]) -> None:
        self._tell_every_s = tell_every_s
        self._clock = clock
        self._outputs: dict[str, EngineOutput] = {}
        self._any = asyncio.Event()
        self._urgent = asyncio.Event()
        self._reported_s = 0.0

    def add(self, output: EngineOutput, *, urgent: bool) -> None:
        """Adds output that follows all earlier output of the run."""
        before = self._outputs.get(output.run_id)
        if before is None:
            self._outputs[output.run_id] = output
        else:
            before.extend(output)
        self._any.set()
        if urgent:
            self._urgent.set()

    def wake(self) -> None:
        """Ends the waiting of `take`, with output or without."""
        self._any.set()
        self._urgent.set()

    def drop(self, run_ids: Iterable[str]) -> None:
        """Forgets unread output of runs."""
        for run_id in run_ids:
            self._outputs.pop(run_id, None)

    async def take(self) -> list[EngineOutput]:
        """Returns all output, once it is due; empty after `wake`, or if all of it was dropped."""
        await self._any.wait()
        wait_s = self._reported_s + self._tell_every_s - self._clock()
        if wait_s > 0.0 and not self._urgent.is_set():
            try:
                async with asyncio.timeout(wait_s):
                    await self._urgent.wait()
            except TimeoutError:
                pass
        self._reported_s = self._clock()
        self._any.clear()
        self._urgent.clear()
        found, self._outputs = list(self._outputs.values()), {}
        return found
