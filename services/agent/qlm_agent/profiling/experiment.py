"""Carries out a profiling experiment on any engine behind the port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from qlm_agent.engines.port import Engine, ModelLoadFailed, Tier
from qlm_agent.profiling.design import (
    OFFLOAD_CYCLES,
    OFFLOAD_STEPS,
    SHORT_PROMPT_TOKENS,
    WHOLE,
    Batch,
    Design,
    EngineLimits,
    Extent,
    design,
)
from qlm_agent.profiling.measurements import DecodeWindow, KvTransfer, Measurements, Prefill
from qlm_agent.profiling.runs import ProfiledRun, ProfilingRuns
from qlm_core.vocabulary.model import ModelSpec

WINDOWS = 4
"""Number of windows that divide the steps of a batch, to show their scatter."""
WARM_LOADS = 3
RESUMED = 2
"""Runs of each long batch that are attempted twice."""


class Profiler:
    """Measures one model. `clock`: the engine's, seconds. `time_scale`: how many times faster than its profile a simulated engine runs.
    `limit_s`: of that profile's clock; when it is over no further batch begins. `extent`: of the experiment."""

    def __init__(
        self, engine: Engine, spec: ModelSpec, *, clock: Callable[[], float], time_scale: float, limit_s: float, extent: Extent = WHOLE
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._clock = clock
        self._scale = time_scale
        self._limit_s = limit_s
        self._extent = extent
        self._began_s = 0.0
        self.found = Measurements(model=spec.name)

    async def measure(self, timeout_s: float, prefix: str) -> Measurements:
        """Runs the experiment; the engine is started, and the model active afterwards. `timeout_s`: longest wait for an output of the
        engine. Raises ProfilingFailed, ModelLoadFailed, EngineBusy, and ValueError for an engine too small to be measured."""
        self._began_s = self._clock()
        await self._loads()
        stats = self._engine.stats()
        self.found.kv_capacity_tokens = stats.kv_capacity_tokens
        limits = EngineLimits(
            context_tokens_max=self._spec.context_tokens_max,
            kv_capacity_tokens=stats.kv_capacity_tokens,
            batch_max=stats.batch_max,
        )
        plan = design(limits, self._extent)
        runs = ProfilingRuns(self._engine, self._spec.name, self._spec.vocabulary_size, prefix, timeout_s)
        async with runs.reading():
            await self._all(plan, runs)
        self.found.engine_s = self._elapsed_s()
        return self.found

    async def _all(self, plan: Design, runs: ProfilingRuns) -> None:
        """In an order that leaves enough for a fit at any limit: prefills once, batches, then the rest."""
        lengths = len(set(plan.prefills))
        await self._prefills(runs, plan.prefills[:lengths])
        for batch in plan.batches:
            if self._left(f"a batch of {batch.sequences} with {batch.prompt_tokens} tokens each"):
                await self._batch(runs, batch)
        if self._left("repeated prefills"):
            await self._prefills(runs, plan.prefills[lengths:])
        if self._left("KV transfers"):
            await self._offloads(runs, plan)

    def _elapsed_s(self) -> float:
        return (self._clock() - self._began_s) * self._scale

    def _left(self, what: str) -> bool:
        """Whether there is time for it."""
        if self._elapsed_s() < self._limit_s:
            return True
        self.found.notes.append(f"the limit of {self._limit_s:g} s left no time for {what}")
        return False

    # Models -----------------------------------------------------------------------------------------------------------

    async def _loads(self) -> None:
        """From the model's tier to the GPU, by way of the disk if the engine allows it."""
        name = self._spec.name
        try:
            if self._engine.tier(name) is Tier.WARM:
                await self._engine.load_model(name, Tier.COLD)
            if self._engine.tier(name) is Tier.COLD:
                before = self._engine.stats().host_memory_used_bytes
                self.found.loads_cold_s.append(self._scale * await self._engine.load_model(name, Tier.WARM))
                self.found.weights_gb = (self._engine.stats().host_memory_used_bytes - before) / 1e9
        except ModelLoadFailed as error:
            self.found.notes.append(f"loads from disk were not measured: {error.message}")
        if self._engine.tier(name) is not Tier.ACTIVE:
            warm = self._engine.tier(name) is Tier.WARM
            took_s = self._scale * await self._engine.load_model(name, Tier.ACTIVE)
            if warm:
                self.found.loads_warm_s.append(took_s)
        try:
            for _ in range(WARM_LOADS - len(self.found.loads_warm_s)):
                await self._engine.load_model(name, Tier.WARM)
                self.found.loads_warm_s.append(self._scale * await self._engine.load_model(name, Tier.ACTIVE))
        except ModelLoadFailed as error:
            self.found.notes.append(f"loads from host memory were not measured: {error.message}")

    # Runs -------------------------------------------------------------------------------------------------------------

    async def _prefills(self, runs: ProfilingRuns, lengths: Sequence[int]) -> None:
        for tokens in lengths:
            if self._left(f"a prefill of {tokens} tokens"):
                run = await runs.start(tokens, 1)
                await runs.ends([run])
                self._prefilled(run)

    def _prefilled(self, run: ProfiledRun) -> None:
        seconds = self._scale * (run.first_s - run.started_s)
        if seconds > 0.0:
            tokens = run.prompt_tokens + run.resumed_tokens
            self.found.prefills.append(Prefill(tokens=tokens, seconds=seconds, resumed=run.resumed_tokens > 0))

    async def _batch(self, runs: ProfilingRuns, batch: Batch) -> None:
        started = await runs.start_together(batch.sequences, batch.prompt_tokens, batch.output_tokens)
        await runs.ends(started)
        self.found.windows += windows_of(started, self._scale)
        if batch.prompt_tokens > SHORT_PROMPT_TOKENS:
            for run in started[:RESUMED]:
                again = await runs.resume(run)
                await runs.ends([again])
                self._prefilled(again)

    async def _offloads(self, runs: ProfilingRuns, plan: Design) -> None:
        """Moves batches to host memory and back."""
        if not self._engine.stats().host_kv_capacity_tokens or not plan.offloads:
            self.found.notes.append("KV transfers were not measured: the engine cannot offload")
            return
        for sequences, prompt_tokens in plan.offloads:
            room = self._spec.context_tokens_max - prompt_tokens
            started = await runs.start_together(sequences, prompt_tokens, min(OFFLOAD_STEPS, room))
            await runs.begin(started)
            moved: list[KvTransfer] = []
            for _ in range(OFFLOAD_CYCLES):
                # An engine may answer before its copies are made, so the slower direction counts for both.
                cycle = await self._cycle([run.run_id for run in started])
                moved += [max(cycle, key=lambda transfer: transfer.seconds)] if cycle else []
            if moved:
                # The clock is read by a task that may be late, and is never early: the least is the nearest.
                self.found.offloads.append(min(moved, key=lambda transfer: transfer.seconds / transfer.tokens))
            await runs.abort(started)

    async def _cycle(self, names: Sequence[str]) -> list[KvTransfer]:
        """Moves runs to host memory and back at once; returns the transfers that moved all of them."""
        before = self._engine.stats()
        away, seconds = await self._timed(self._engine.offload(names))
        after = self._engine.stats()
        tokens = after.host_kv_used_tokens - before.host_kv_used_tokens
        if tokens <= 0:
            return []
        self.found.kv_bytes_per_token = (after.host_memory_used_bytes - before.host_memory_used_bytes) / tokens
        moved = [KvTransfer(tokens=tokens, seconds=seconds)]
        back, seconds = await self._timed(self._engine.restore(list(away)))
        return [*moved, KvTransfer(tokens=tokens, seconds=seconds)] if len(back) == len(away) else moved

    async def _timed(self, operation: Awaitable[Sequence[str]]) -> tuple[Sequence[str], float]:
        began_s = self._clock()
        found = await operation
        return found, self._scale * (self._clock() - began_s)


def windows_of(runs: Sequence[ProfiledRun], scale: float) -> list[DecodeWindow]:
    """The time in which all of them decoded, from the last first token to the first end, by the outputs of the run that began last."""
    last = max(runs, key=lambda run: run.first_s)
    until_s = min(run.points[-1][0] for run in runs)
    seen = [(at_s, float(tokens)) for at_s, tokens in last.points if last.first_s < at_s <= until_s]
    if not seen and last.first_s < until_s:
        # Too few reports: its steps were alike until the others began to end, and nearly so afterwards.
        seen = [(until_s, last.tokens_at(until_s))]
    points = [(last.first_s, 1.0), *seen]
    every = max(1, len(points) // WINDOWS)
    ends = [*points[every::every][: WINDOWS - 1], points[-1]]
    found = []
    began_s, began = points[0]
    for at_s, tokens in ends:
        steps = tokens - began
        if steps <= 0.0:
            continue
        middle_s = 0.5 * (began_s + at_s)
        context = sum(run.prompt_tokens + run.tokens_at(middle_s) for run in runs)
        found.append(DecodeWindow(steps=steps, sequences=len(runs), context_tokens=context, seconds=scale * (at_s - began_s)))
        began_s, began = at_s, tokens
    return found
