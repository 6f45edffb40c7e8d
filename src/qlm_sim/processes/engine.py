"""The simulated engine's core behind the engine port, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from qlm_agent.engines.port import EngineFailure, EngineOutput, EngineRequest, EngineStats, FailureKind, Tier
from qlm_agent.engines.simulated.batching.transfers import OperationEnded
from qlm_agent.engines.simulated.core import SimulatedCore
from qlm_agent.engines.simulated.timing import InstanceNoise
from qlm_sim.world.chance import Chance
from qlm_sim.world.process import Process, Task, suspend


class Straggler(InstanceNoise):
    """Noise of an instance that may be slower than it should, by `slowness`, for a while."""

    slowness = 1.0

    def factor(self) -> float:
        return super().factor() * self.slowness


class VirtualEngine:
    """See `qlm_agent.engines.port.Engine`; `emit` is called with outputs. `wake_min_s`: least time between two polls of the core: outputs
    between them keep their own times, and are reported together. `breaks`: probability that an output is a failure instead."""

    def __init__(
        self,
        process: Process,
        core: SimulatedCore,
        emit: Callable[[Sequence[EngineOutput]], None],
        *,
        wake_min_s: float,
        chance: Chance,
    ) -> None:
        self.core = core
        self.breaks = 0.0
        self.broken = 0
        self._process = process
        self._emit = emit
        self._wake_min_s = wake_min_s
        self._chance = chance
        self._alarm = process.alarm(self._poll)
        self._polled_s = 0.0
        self._due_s: float | None = None
        self._waiting: dict[int, Task] = {}

    @property
    def text_output(self) -> bool:
        return False

    async def start(self) -> None:
        """Nothing to do: it starts with all models cold."""

    async def stop(self) -> None:
        self.core.stop(self._process.now_s())

    def tier(self, model: str) -> Tier:
        return self.core.tier(model)

    def stats(self) -> EngineStats:
        self.core.advance(self._process.now_s())
        self._arm()
        return self.core.stats()

    async def load_model(self, model: str, tier: Tier) -> float:
        ended = await self._end_of(self.core.load(self._process.now_s(), model, tier))
        if ended.error is not None:
            raise ended.error
        return ended.took_s

    async def add(self, request: EngineRequest) -> None:
        self.core.add(self._process.now_s(), request)
        self._arm()

    async def abort(self, run_ids: Sequence[str]) -> None:
        self.core.abort(self._process.now_s(), run_ids)
        self._arm()

    async def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        return (await self._end_of(self.core.offload(self._process.now_s(), run_ids))).run_ids

    async def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        return (await self._end_of(self.core.restore(self._process.now_s(), run_ids))).run_ids

    async def pause(self) -> None:
        self.core.pause(self._process.now_s())

    async def resume(self) -> None:
        self.core.resume(self._process.now_s())
        self._arm()

    async def outputs(self) -> Sequence[EngineOutput]:
        raise AssertionError("outputs are reported as they are made")

    # Time -------------------------------------------------------------------------------------------------------------

    async def _end_of(self, number: int) -> OperationEnded:
        def wait(task: Task) -> None:
            self._waiting[number] = task
            self._arm()

        ended: OperationEnded = await suspend(wait)
        return ended

    def _arm(self) -> None:
        """A poll that is due stays due: the core may have output for that time."""
        due_s = self.core.next_due_s
        if due_s is None:
            return
        due_s = max(due_s, self._polled_s + self._wake_min_s)
        if self._due_s is None or due_s < self._due_s:
            self._due_s = due_s
            self._alarm.set(due_s)

    def _poll(self) -> None:
        self._due_s = None
        now_s = self._polled_s = self._process.now_s()
        self.core.advance(now_s)
        outputs = self.core.outputs(now_s)
        if self.breaks:
            outputs = [self._perhaps_broken(now_s, output) for output in outputs]
        if outputs:
            self._emit(outputs)
        for ended in self.core.ended():
            self._waiting.pop(ended.number).resume(ended)
        self._arm()

    def _perhaps_broken(self, now_s: float, output: EngineOutput) -> EngineOutput:
        if output.finish is not None or output.failure is not None or not self._chance.happens(self.breaks):
            return output
        self.broken += 1
        self.core.abort(now_s, [output.run_id])
        return replace(output, failure=EngineFailure(kind=FailureKind.BROKEN, message="a simulated fault of the engine"))
