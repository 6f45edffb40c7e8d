"""The simulated engine in real time: the engine port over `SimulatedBatch`, models from the hardware profiles.

The shell makes all steps that are due whenever it wakes, tells first tokens and ends at once, and the tokens between every `tell_every_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qlm_agent.engine import (
    EngineBusy,
    EngineFailure,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FailureKind,
    FinishReason,
    ModelLoadFailed,
    Tier,
)
from qlm_agent.engine_policy import EnginePolicy
from qlm_agent.simulated.answers import Answer, answer_to
from qlm_agent.simulated.batch import SimulatedBatch
from qlm_agent.simulated.host_memory import HostMemory
from qlm_agent.simulated.sequences import Progress, RunState
from qlm_agent.simulated.timing import InstanceNoise, StepTiming
from qlm_core.errors import InvalidRequest
from qlm_core.model import ModelSpec
from qlm_core.profile import HardwareProfile

WAKE_MIN_S = 0.002
"""Least time between two wake-ups: steps that are shorter are made together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A model that the engine can serve, and its profile on the engine's GPUs."""

    spec: ModelSpec
    profile: HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLimits:
    """`time_scale`: how many times faster than its profile it runs. `host_memory_gb`: budget for weights in host memory.
    `kv_capacity_tokens`: 0 for the profile's."""

    time_scale: float = 1.0
    batch_max: int = 256
    prefill_chunk_tokens: int = 2048
    host_memory_gb: float = 64.0
    kv_capacity_tokens: int = 0
    tell_every_s: float = 0.02


class SimulatedEngine:
    """See `qlm_agent.engine.Engine`."""

    def __init__(
        self,
        models: Mapping[str, SimulatedModel],
        noise: InstanceNoise,
        policy: EnginePolicy,
        limits: SimulatedLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = models
        self._policy = policy
        self._limits = limits
        self._clock = clock
        self._timings = {name: StepTiming(model.profile, noise, limits.time_scale) for name, model in models.items()}
        weights_gb = {name: model.profile.weights_gb for name, model in models.items()}
        self._host = HostMemory(budget_gb=limits.host_memory_gb, weights_gb=weights_gb)
        self._active = ""
        self._batch: SimulatedBatch | None = None
        self._answers: dict[str, Answer] = {}
        self._at_once: list[EngineOutput] = []
        self._arrivals = 0
        self._preemptions = 0  # under models that were active before
        self._told_s = 0.0
        self._paused_s: float | None = None
        self._wake = asyncio.Event()
        self._loading = asyncio.Lock()

    @property
    def tells_text(self) -> bool:
        return False

    async def start(self) -> None:
        """Nothing to do: it starts with all models cold."""

    async def stop(self) -> None:
        await self.abort(list(self._answers))

    def tier(self, model: str) -> Tier:
        if model == self._active:
            return Tier.ACTIVE
        return Tier.WARM if self._host.holds(model) else Tier.COLD

    def stats(self) -> EngineStats:
        batch = self._batch
        return EngineStats(
            active_model=self._active,
            warm_models=tuple(model for model in self._host.models if model != self._active),
            running=0 if batch is None else batch.running,
            waiting=0 if batch is None else batch.waiting,
            batch_max=self._limits.batch_max,
            kv_used_tokens=0 if batch is None else batch.kv_used_tokens,
            kv_capacity_tokens=0 if batch is None else self._kv_capacity(self._active),
            preemptions=self._preemptions + (0 if batch is None else batch.preemptions),
        )

    # Models -----------------------------------------------------------------------------------------------------------

    async def load_model(self, model: str, tier: Tier) -> float:
        if model not in self._models:
            raise ModelLoadFailed(f"model {model} is not one of {', '.join(self._models)}")
        began_s = self._clock()
        async with self._loading:  # transfers share one bus
            replaces_active = model != self._active if tier is Tier.ACTIVE else model == self._active
            if replaces_active and self._answers:
                raise EngineBusy(f"model {self._active} has {len(self._answers)} runs")
            if tier is Tier.ACTIVE:
                await self._activate(model)
            elif tier is Tier.WARM:
                await self._warm(model)
            else:
                self._leave_gpu(model)
                self._host.drop(model)
        return self._clock() - began_s

    async def _activate(self, model: str) -> None:
        if model == self._active:
            return
        self._leave_gpu(self._active)
        timing = self._timings[model]
        if not self._host.holds(model):
            await asyncio.sleep(timing.disk_to_host_s())
        await asyncio.sleep(timing.host_to_gpu_s())
        if self._host.fits(model):
            self._host.hold(model)
        self._active = model
        self._batch = SimulatedBatch(
            step_s=timing.step_s,
            kv_capacity_tokens=self._kv_capacity(model),
            batch_max=self._limits.batch_max,
            prefill_chunk_tokens=self._limits.prefill_chunk_tokens,
            policy=self._policy,
        )

    async def _warm(self, model: str) -> None:
        if not self._host.fits(model):
            raise ModelLoadFailed(f"model {model}: its weights do not fit in the host memory budget of {self._limits.host_memory_gb} GB")
        if not self._host.holds(model):
            await asyncio.sleep(self._timings[model].disk_to_host_s())
        self._host.hold(model)
        self._leave_gpu(model)

    def _leave_gpu(self, model: str) -> None:
        if model and model == self._active:
            self._preemptions += 0 if self._batch is None else self._batch.preemptions
            self._active, self._batch = "", None

    def _kv_capacity(self, model: str) -> int:
        return self._limits.kv_capacity_tokens or self._models[model].profile.kv_capacity_tokens

    # Runs -------------------------------------------------------------------------------------------------------------

    async def add(self, request: EngineRequest) -> None:
        now_s = self._clock()
        batch = self._batch
        if batch is None or request.model != self._active:
            self._refuse(request, FailureKind.BROKEN, f"model {request.model} is not active", now_s)
            return
        try:
            answer = answer_to(request, self._models[request.model].spec)
        except InvalidRequest as error:
            self._refuse(request, FailureKind.REFUSED, error.message, now_s)
            return
        if answer.resumed_tokens == answer.target_tokens:
            # An earlier attempt made all of it and was lost before it could say so.
            self._at_once.append(EngineOutput(request.run_id, b"", now_s, now_s, now_s, finish=_finish(answer)))
            self._wake.set()
            return
        self._arrivals += 1
        self._answers[request.run_id] = answer
        self._advance(now_s)
        run = RunState(
            run_id=request.run_id,
            arrival=self._arrivals,
            deadline_s=request.deadline_s,
            priority=request.priority,
            prompt_tokens=answer.prompt_tokens,
            target_tokens=answer.target_tokens,
            produced=answer.resumed_tokens,
            resumed=answer.resumed_tokens,
            told=answer.resumed_tokens,
        )
        idle = batch.next_due_s is None
        batch.add(now_s, run)
        if idle:
            self._wake.set()

    async def abort(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            if self._answers.pop(run_id, None) is not None and self._batch is not None:
                self._batch.abort(run_id)
        dropped = set(run_ids)
        self._at_once = [output for output in self._at_once if output.run_id not in dropped]

    async def pause(self) -> None:
        if self._paused_s is None:
            self._advance(self._clock())
            self._paused_s = self._clock()

    async def resume(self) -> None:
        if self._paused_s is not None:
            if self._batch is not None:
                self._batch.postpone(self._clock() - self._paused_s)
            self._paused_s = None
            self._wake.set()

    async def outputs(self) -> Sequence[EngineOutput]:
        while True:
            now_s = self._clock()
            self._advance(now_s)
            found = self._collect(now_s)
            if found:
                return found
            await self._sleep(now_s)

    def _advance(self, now_s: float) -> None:
        if self._batch is not None and self._paused_s is None:
            self._batch.advance(now_s)

    def _collect(self, now_s: float) -> list[EngineOutput]:
        found, self._at_once = self._at_once, []
        if self._batch is None:
            return found
        if now_s - self._told_s >= self._limits.tell_every_s:
            self._told_s = now_s
            told = self._batch.progress()
        else:
            told = self._batch.news()
        found += [self._output(progress) for progress in told]
        return found

    async def _sleep(self, now_s: float) -> None:
        """Until the step under way ends, or until a call has made something to do."""
        due_s = self._batch.next_due_s if self._batch is not None and self._paused_s is None else None
        timer = None
        if due_s is not None:
            timer = asyncio.get_running_loop().call_later(max(due_s - now_s, WAKE_MIN_S), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            self._wake.clear()
            if timer is not None:
                timer.cancel()

    def _output(self, progress: Progress) -> EngineOutput:
        answer = self._answers[progress.run_id]
        finish = None
        if progress.done:
            del self._answers[progress.run_id]
            finish = _finish(answer) if progress.failure is None else None
        return EngineOutput(
            run_id=progress.run_id,
            token_ids=answer.slice(progress.start, progress.end),
            started_s=progress.started_s,
            first_s=progress.first_s,
            last_s=progress.last_s,
            finish=finish,
            failure=progress.failure,
        )

    def _refuse(self, request: EngineRequest, kind: FailureKind, message: str, now_s: float) -> None:
        failure = EngineFailure(kind=kind, message=message)
        self._at_once.append(EngineOutput(request.run_id, b"", now_s, now_s, now_s, failure=failure))
        self._wake.set()


def _finish(answer: Answer) -> FinishReason:
    return FinishReason.LENGTH if answer.cut else FinishReason.STOP
