"""Between the machine and the engine: performs engine effects in order, and converts outputs to events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, assert_never

import structlog

from qlm_agent.decisions.effects import AbortRuns, LoadModel, OffloadRuns, PauseEngine, RestoreRuns, ResumeEngine, StartRun
from qlm_agent.decisions.events import EngineEnd, EngineProgress, Event, ModelLoaded, ModelNotLoaded, OtherLoad, RunsOffloaded, RunsRestored
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.engines.port import Engine, EngineBusy, EngineOutput, EngineStats, FailureKind, ModelLoadFailed, Tier
from qlm_agent.telemetry.metrics import AgentTelemetry
from qlm_agent.telemetry.operations import Lso, ModelMove

LOSSES = (FailureKind.BROKEN, FailureKind.AWAY)
"""Failures after which the engine may have lost its model."""

EngineEffect = StartRun | AbortRuns | OffloadRuns | RestoreRuns | LoadModel | PauseEngine | ResumeEngine


class EngineDriver:
    """`held`: the runs of the agent, shared with the shell. The queue of effects is bounded by the runs and transfers that there can be."""

    def __init__(
        self,
        engine: Engine,
        held: dict[str, HeldRun],
        telemetry: AgentTelemetry,
        *,
        now_s: Callable[[], float],
        step: Callable[[Event], None],
        engine_clock: Callable[[], float] = time.monotonic,
        incarnation: Callable[[], str] = lambda: "",
    ) -> None:
        """`incarnation`: the current owner of the runs, for events."""
        self._engine = engine
        self._held = held
        self._telemetry = telemetry
        self._now_s = now_s
        self._step = step
        self._engine_clock = engine_clock
        self._incarnation = incarnation
        self._effects: asyncio.Queue[EngineEffect] = asyncio.Queue()
        self._active = ""  # as last reported to the machine
        self._loads = 0  # under way
        self._others = OtherLoad(runs=0, kv_tokens=0)  # as last reported to the machine

    def put(self, effect: EngineEffect) -> None:
        """Queues an effect."""
        self._effects.put_nowait(effect)

    async def drive(self) -> None:
        """Performs effects until it is cancelled. A transfer runs beside the effects after it."""
        async with asyncio.TaskGroup() as transfers:
            while True:
                await self.perform(await self._effects.get(), transfers.create_task)

    async def perform(self, effect: EngineEffect, beside: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Performs one effect. `beside`: starts long work, while others are performed."""
        match effect:
            case StartRun():
                held = self._held.get(effect.run_id)
                if held is not None:
                    assert held.request is not None
                    await self._engine.add(replace(held.request, length_quantiles=effect.length_quantiles))
            case AbortRuns():
                now_s = self._now_s()
                for run_id in effect.run_ids:
                    if run_id in self._held:
                        self._held[run_id].taken_off_s = now_s
                await self._engine.abort(effect.run_ids)
            case PauseEngine():
                structlog.get_logger().warning("engine_paused")
                await self._engine.pause()
            case ResumeEngine():
                structlog.get_logger().info("engine_resumed")
                await self._engine.resume()
            case OffloadRuns() | RestoreRuns():
                beside(self._move_kv(effect))
            case LoadModel():
                beside(self._load(effect))
            case _:
                assert_never(effect)

    async def read(self) -> None:
        """Reads outputs until it is cancelled."""
        while True:
            self.report_outputs(await self._engine.outputs())

    def report_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Steps the machine with the engine's outputs."""
        to_server_s = self._now_s() - self._engine_clock()
        counts: list[tuple[str, int]] = []
        ended: list[EngineEnd] = []
        cached: list[tuple[str, int]] = []
        for output in outputs:
            held = self._held.get(output.run_id)
            if held is None:
                continue
            tokens = held.output.add(output)
            if not held.started_s:
                held.started_s = output.started_s + to_server_s
                if tokens and tokens == len(held.output):
                    held.first_token_s = output.first_s + to_server_s
            held.last_token_s = output.last_s + to_server_s
            held.paused_s = output.paused_s
            if held.cached_tokens is None and output.cached_tokens is not None:
                held.cached_tokens = output.cached_tokens
                cached.append((output.run_id, output.cached_tokens))
            if output.finish is None and output.failure is None:
                counts.append((output.run_id, tokens))
            else:
                ended.append(_end(output, tokens))
        if not outputs or any(end.failure in LOSSES for end in ended):
            self._check_stats()  # first, so that nothing is pulled into the seats that become free
        self._step(EngineProgress(counts=counts, ended=ended, cached=cached))

    def _check_stats(self) -> None:
        """Reports changes that no output carries. An engine that lost its active model by itself (a dead process or server) counts as a
        failed load, so that nothing is pulled until the model is loaded again."""
        stats = self._engine.stats()
        if stats.active_model == self._active:
            self._report_others(stats)
        elif self._active and not stats.active_model and not self._loads:
            lost, self._active = self._active, ""
            message = "the engine lost it"
            structlog.get_logger().error("model_lost", model=lost)
            event = ModelNotLoaded(model=lost, tier=Tier.ACTIVE, message=message, active="", warm=stats.warm_models)
            self._report_model(stats, event)

    def _report_model(self, stats: EngineStats, event: ModelLoaded | ModelNotLoaded) -> None:
        """The load of others is reported before a model is active, so that nothing is pulled without room beside it. Without a model it is
        zero, reported once the model is known to be lost."""
        if stats.active_model:
            self._report_others(stats)
        self._step(event)
        self._report_others(stats)

    def _report_others(self, stats: EngineStats) -> None:
        others = OtherLoad(runs=stats.others_runs, kv_tokens=stats.others_kv_tokens)
        if others != self._others:
            self._others = others
            self._step(others)

    async def _move_kv(self, effect: OffloadRuns | RestoreRuns) -> None:
        began_s, called_s = self._now_s(), self._engine_clock()
        event: RunsOffloaded | RunsRestored
        if isinstance(effect, OffloadRuns):
            lso, done = Lso.KV_OFFLOAD, await self._engine.offload(effect.run_ids)
            event = RunsOffloaded(requested=effect.run_ids, done=done)
        else:
            lso, done = Lso.KV_RESTORE, await self._engine.restore(effect.run_ids)
            event = RunsRestored(requested=effect.run_ids, done=done)
        took_s = self._engine_clock() - called_s
        structlog.get_logger().debug("kv_moved", lso=lso.value, requested=len(effect.run_ids), done=len(done), took_s=round(took_s, 4))
        moved = [self._held[run_id] for run_id in done if run_id in self._held]
        measured_s = took_s if len(moved) == len(done) else 0.0  # the size of the move is not known without all of them
        self._telemetry.lso.record_kv_move(lso, moved, self._incarnation(), began_s, self._now_s(), measured_s)
        self._step(event)

    async def _load(self, effect: LoadModel) -> None:
        self._loads += 1
        try:
            await self._loaded(effect)
        finally:
            self._loads -= 1
        self._check_stats()

    async def _loaded(self, effect: LoadModel) -> None:
        began_s, log, metrics = self._now_s(), structlog.get_logger(), self._telemetry.metrics
        from_model, from_tier = self._engine.stats().active_model, self._engine.tier(effect.model)
        event: ModelLoaded | ModelNotLoaded
        try:
            took_s = await self._engine.load_model(effect.model, effect.tier)
        except (ModelLoadFailed, EngineBusy) as error:
            log.error("model_not_loaded", model=effect.model, tier=effect.tier.value, error=error.message)
            metrics.failed_loads.labels(model=effect.model).inc()
            stats = self._engine.stats()
            event = ModelNotLoaded(
                model=effect.model, tier=effect.tier, message=error.message, active=stats.active_model, warm=stats.warm_models
            )
        else:
            log.info("model_moved", model=effect.model, tier=effect.tier.value, took_s=round(took_s, 3))
            if effect.tier is Tier.ACTIVE:
                metrics.swaps.labels(model=effect.model).inc()
            move = ModelMove(model=effect.model, tier=effect.tier, from_tier=from_tier, from_model=from_model, took_s=took_s)
            self._telemetry.lso.record_model_move(move, self._incarnation(), began_s, self._now_s())
            stats = self._engine.stats()
            event = ModelLoaded(
                model=effect.model,
                tier=effect.tier,
                took_s=took_s,
                active=stats.active_model,
                warm=stats.warm_models,
                kv_capacity_tokens=stats.kv_capacity_tokens,
                host_kv_capacity_tokens=stats.host_kv_capacity_tokens,
            )
        self._active = stats.active_model
        self._report_model(stats, event)


def _end(output: EngineOutput, tokens: int) -> EngineEnd:
    failure = output.failure
    return EngineEnd(
        run_id=output.run_id,
        tokens=tokens,
        finish=output.finish,
        failure=None if failure is None else failure.kind,
        message="" if failure is None else failure.message,
    )
