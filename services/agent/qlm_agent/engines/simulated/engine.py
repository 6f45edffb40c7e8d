"""The simulated engine in real time: the engine port over `SimulatedCore`.

Every waiter, for output or for the end of an operation, advances the core when it is due; nothing runs in the background.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from qlm_agent.engines.policies.port import EnginePolicy
from qlm_agent.engines.port import EngineOutput, EngineRequest, EngineStats, Tier
from qlm_agent.engines.simulated.batching.transfers import OperationEnded
from qlm_agent.engines.simulated.core import SimulatedCore, SimulatedLimits, SimulatedModel
from qlm_agent.engines.simulated.timing import InstanceNoise

SPIN_S = 0.00025
TIMER_LEAST_S = 0.0006
"""uvloop rounds timers to milliseconds: one below half of that fires at once. Waits below SPIN_S spin, and those above take the next
millisecond, which costs less than thirty polls."""

ADVANCE_EVERY_S = 0.002
"""Least time between two advances of the core: shorter steps are made together."""


class SimulatedEngine:
    """See `qlm_agent.engines.port.Engine`."""

    def __init__(
        self,
        models: Mapping[str, SimulatedModel],
        noise: InstanceNoise,
        policy: EnginePolicy,
        limits: SimulatedLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = SimulatedCore(models, noise, policy, limits)
        self._clock = clock
        self._wake = asyncio.Event()
        self._advanced_s = 0.0
        self._waited_for: dict[int, OperationEnded | None] = {}

    @property
    def text_output(self) -> bool:
        return False

    async def start(self) -> None:
        """Nothing to do: it starts with all models cold."""

    async def stop(self) -> None:
        self._core.stop(self._clock())

    def tier(self, model: str) -> Tier:
        self._advance(self._clock())
        return self._core.tier(model)

    def stats(self) -> EngineStats:
        self._advance(self._clock())
        return self._core.stats()

    async def load_model(self, model: str, tier: Tier) -> float:
        ended = await self._end_of(self._core.load(self._clock(), model, tier))
        if ended.error is not None:
            raise ended.error
        return ended.took_s

    async def add(self, request: EngineRequest) -> None:
        self._core.add(self._clock(), request)
        self._wake.set()

    async def abort(self, run_ids: Sequence[str]) -> None:
        self._core.abort(self._clock(), run_ids)

    async def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        return (await self._end_of(self._core.offload(self._clock(), run_ids))).run_ids

    async def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        return (await self._end_of(self._core.restore(self._clock(), run_ids))).run_ids

    async def pause(self) -> None:
        self._core.pause(self._clock())
        self._wake.set()

    async def resume(self) -> None:
        self._core.resume(self._clock())
        self._wake.set()

    async def outputs(self) -> Sequence[EngineOutput]:
        while True:
            now_s = self._clock()
            due_s = self._core.next_due_s
            if due_s is not None and due_s <= now_s:
                self._advanced_s = now_s
            self._advance(now_s)
            found = self._core.outputs(now_s)
            if found:
                return found
            await self._sleep(now_s)

    def _advance(self, now_s: float) -> None:
        self._core.advance(now_s)
        for ended in self._core.ended():
            if ended.number in self._waited_for:  # else its caller was cancelled
                self._waited_for[ended.number] = ended

    async def _end_of(self, number: int) -> OperationEnded:
        """Waits for the end of an operation, which continues if the caller is cancelled."""
        self._waited_for[number] = None
        self._wake.set()
        try:
            while True:
                now_s = self._clock()
                self._advance(now_s)
                ended = self._waited_for[number]
                if ended is not None:
                    return ended
                due_s = self._core.transfer_due_s
                assert due_s is not None, f"operation {number} has nothing to wait for"
                await asyncio.sleep(max(due_s - now_s, 0.0))
        finally:
            del self._waited_for[number]

    async def _sleep(self, now_s: float) -> None:
        """Sleeps until something is due, or until a call."""
        due_s = self._core.next_due_s
        timer = None
        if due_s is not None:
            # From the last advance, not from now: a run added in the middle of a step does not delay the end of that step.
            wait_s = max(due_s, self._advanced_s + ADVANCE_EVERY_S) - now_s
            delay_s = 0.0 if wait_s < SPIN_S else max(wait_s, TIMER_LEAST_S)
            timer = asyncio.get_running_loop().call_later(delay_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            self._wake.clear()
            if timer is not None:
                timer.cancel()
