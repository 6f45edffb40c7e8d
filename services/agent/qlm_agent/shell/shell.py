"""The agent's shell: events in, effects out. It reads the engine, the control stream and the clock, steps the machine, and performs the
machine's effects; it decides nothing."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

import structlog

from qlm.api.v1 import instance_pb2
from qlm_agent.config import AgentConfig
from qlm_agent.decisions.effects import (
    AbortRuns,
    Complete,
    Deregister,
    Describe,
    DrainAnswer,
    Effect,
    Emit,
    ForgetRun,
    GiveBack,
    LoadAnswer,
    LoadModel,
    OffloadRuns,
    PauseEngine,
    Pull,
    ReadOwned,
    Register,
    RestoreRuns,
    ResumeEngine,
    StartRun,
    Stop,
)
from qlm_agent.decisions.events import AgentStart, CallLost, DrainCommand, Event, LeaseLoss, LoadCommand, RegisterAnswer, TimePassed
from qlm_agent.decisions.machine import AgentMachine, Life
from qlm_agent.decisions.runs import RemovalCause
from qlm_agent.decisions.settings import MachineSettings
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.engines.driver import EngineDriver
from qlm_agent.engines.port import Engine, Tier
from qlm_agent.shell.announcements import Announcer
from qlm_agent.shell.control import control_events
from qlm_agent.shell.profile_watch import watch_profiles
from qlm_agent.shell.running_report import running_report
from qlm_agent.shell.server_calls import ServerCalls, ServerEffect
from qlm_agent.telemetry.metrics import AgentTelemetry
from qlm_core.vocabulary.errors import LeaseLost, NotFound, PreconditionFailed, Unavailable
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_process.queue.leases import LeaseKeeper
from qlm_queue.port import Queue


class AgentShell:
    """One agent. `run` once. `profiles`: by model, the name of its row in the estimator's profiles. `on_serving`: called whenever the agent
    starts or stops taking requests."""

    def __init__(
        self,
        queue: Queue,
        engine: Engine,
        facts: InstanceFacts,
        machine_settings: MachineSettings,
        config: AgentConfig,
        telemetry: AgentTelemetry,
        *,
        profiles: Mapping[str, str],
        now_s: Callable[[], float],
        on_serving: Callable[[bool], None],
    ) -> None:
        self.machine = AgentMachine(machine_settings)
        self._queue = queue
        self._engine = engine
        self._hardware = machine_settings.hardware
        self._drain_finish_s = config.agent.drain_finish_s
        self._profiles = profiles
        self._telemetry = telemetry
        self._now_s = now_s
        self._on_serving = on_serving
        self._held: dict[str, HeldRun] = {}
        self._calls = ServerCalls(
            queue,
            facts,
            self._held,
            telemetry,
            now_s=now_s,
            text_output=engine.text_output,
            lease_ttl_s=config.queue.lease_ttl_s,
            lease_renew_s=config.queue.lease_renew_s,
            slo_band=machine_settings.slo_band,
        )
        self._driver = EngineDriver(
            engine, self._held, telemetry, now_s=now_s, step=self._step, incarnation=lambda: self.machine.incarnation
        )
        self._announcer = Announcer(
            queue, config.agent.heartbeat_s, lambda: self._calls.facts, self.load, self._publish, config.security.credentials()
        )
        self._group: asyncio.TaskGroup | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when it rings
        self._due = asyncio.Event()
        self._lease_watch: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._serving = False
        self._call_numbers = itertools.count(1)
        self._callers: dict[int, asyncio.Future[DrainAnswer | LoadAnswer]] = {}

    @property
    def facts(self) -> InstanceFacts:
        return self._calls.facts

    def load(self) -> instance_pb2.InstanceLoad:
        """The agent now; it also sets the metrics."""
        stats = self._engine.stats()
        model_swap, operations = self.machine.model_swap, self.machine.operations
        load = instance_pb2.InstanceLoad(
            active_model=stats.active_model,
            warm_models=stats.warm_models,
            running=self.machine.runs.running,
            kv_used_tokens=stats.kv_used_tokens,
            kv_capacity_tokens=stats.kv_capacity_tokens,
            swapping_to=model_swap.swapping_to,
            model_swaps=model_swap.swaps,
            completed=self.machine.delivery.finished,
            evictions=operations.evictions,
            kv_offloads=operations.kv_offloads,
            kv_restores=operations.kv_restores,
            warmings=operations.warmings,
            offloaded=stats.offloaded,
            host_memory_used_bytes=stats.host_memory_used_bytes,
            host_memory_bytes=stats.host_memory_capacity_bytes,
            eviction_choice=self.machine.eviction.choice_text(stats.active_model),
            batch=self.machine.batch_reported,
            prefill_left_tokens=self.machine.runs.prefill_left_tokens,
            token_s=self.machine.expectations.token_s(stats.active_model),
        )
        self._telemetry.load(load, stats, self.machine.runs.held_tokens)
        return load

    async def run(self, stop: asyncio.Event, address: str) -> None:
        """Serves until `stop` is set and all is finished or given back. `address`: of the Agent service."""
        self._calls.facts = replace(self._calls.facts, address=address, started_s=self._now_s())
        await self._engine.start()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                after = f"{int(self._now_s() * 1000)}-0"
                background = [
                    group.create_task(self._driver.read(), name="engine-outputs"),
                    group.create_task(self._driver.drive(), name="engine-calls"),
                    group.create_task(control_events(self._queue, self.facts.name, after, self._step), name="control"),
                    group.create_task(self._announcer.run(), name="announcer"),
                    group.create_task(self._watch_profiles(), name="profiles"),
                    group.create_task(self._keep_time(), name="timer"),
                    group.create_task(self._stop_on(stop), name="stop"),
                ]
                self._step(AgentStart())
                await self._stopped.wait()
                await self._end_watch()
                for task in background:
                    task.cancel()
        finally:
            self._group = None
            if self._timer is not None:
                self._timer.cancel()
            self._set_serving(False)
            await self._end_lease()
            for future in self._callers.values():
                future.cancel()
            await self._engine.stop()

    # Calls of others --------------------------------------------------------------------------------------------------

    async def drain(self, finish_s: float) -> tuple[int, int]:
        """Stops pulling; returns the counts of finished and given back runs once the agent owns nothing."""
        number, future = self._new_call()
        self._step(DrainCommand(finish_s=finish_s, stop=False, caller=number))
        answer = await self._answer(number, future)
        assert isinstance(answer, DrainAnswer)
        return answer.finished, answer.given_back

    async def move_model(self, model: str, tier: Tier) -> float:
        """Makes a model warm or cold; returns the seconds it took. Raises NotFound and PreconditionFailed."""
        number, future = self._new_call()
        self._step(LoadCommand(caller=number, model=model, tier=tier))
        answer = await self._answer(number, future)
        assert isinstance(answer, LoadAnswer)
        if answer.problem == "UNKNOWN_MODEL":
            raise NotFound(answer.message, reason=answer.problem, details={"model": model})
        if answer.problem:
            raise PreconditionFailed(answer.message, reason=answer.problem, details={"model": model})
        return answer.took_s

    def _new_call(self) -> tuple[int, asyncio.Future[DrainAnswer | LoadAnswer]]:
        number = next(self._call_numbers)
        future: asyncio.Future[DrainAnswer | LoadAnswer] = asyncio.get_running_loop().create_future()
        self._callers[number] = future
        return number, future

    async def _answer(self, number: int, future: asyncio.Future[DrainAnswer | LoadAnswer]) -> DrainAnswer | LoadAnswer:
        try:
            return await future
        finally:
            self._callers.pop(number, None)

    # Events -----------------------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        if self._group is None:
            return
        now_s, serves = self._now_s(), self.machine.serves
        for effect in self.machine.step(now_s, event):
            self._perform(effect)
        if self.machine.serves != serves:
            self._announcer.hurry()
        self._set_serving(self.machine.life is Life.SERVING and not self.machine.draining)
        self._set_timer(now_s)

    def _set_timer(self, now_s: float) -> None:
        wakeup_s = self.machine.next_wakeup_s
        if self._timer is not None:
            if wakeup_s == self._timer_s:
                return
            self._timer.cancel()
            self._timer = None
        if wakeup_s is not None:
            self._timer_s = wakeup_s
            # Whole milliseconds, as uvloop has them, and never early: the timer would fire repeatedly.
            delay_s = math.ceil(max(0.0, wakeup_s - now_s) * 1e3) / 1e3
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._due.set()

    async def _keep_time(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            self._step(TimePassed())

    def _set_serving(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            self._on_serving(serving)

    async def _stop_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._step(DrainCommand(finish_s=self._drain_finish_s, stop=True))

    # Effects ----------------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Register() | Describe() | Deregister() | Pull() | ReadOwned() | Emit() | Complete() | GiveBack():
                assert self._group is not None
                self._group.create_task(self._call(effect, self._calls.held_by(effect)), name=type(effect).__name__)
            case StartRun() | AbortRuns() | OffloadRuns() | RestoreRuns() | LoadModel() | PauseEngine() | ResumeEngine():
                self._driver.put(effect)
            case ForgetRun():
                held = self._held.pop(effect.run_id)
                self._telemetry.record_engine_exit(held)
                self._telemetry.metrics.dropped.inc(effect.cause is RemovalCause.NOT_OWNED)
            case DrainAnswer():
                for number in effect.callers:
                    self._settle(number, effect)
            case LoadAnswer():
                self._settle(effect.caller, effect)
            case Stop():
                self._stopped.set()
            case _:
                assert_never(effect)

    def _settle(self, number: int, answer: DrainAnswer | LoadAnswer) -> None:
        future = self._callers.get(number)
        if future is not None and not future.done():
            future.set_result(answer)

    async def _call(self, effect: ServerEffect, runs: Sequence[HeldRun]) -> None:
        incarnation = self.facts.incarnation
        try:
            answer = await self._calls.perform(effect, runs)
        except (Unavailable, LeaseLost) as error:
            name = type(effect).__name__
            structlog.get_logger().warning("call_lost", call=name, error=str(error))
            self._telemetry.metrics.lost_calls.labels(call=name).inc()
            self._step(CallLost(call=effect.call))
            if isinstance(error, LeaseLost):
                self._lose_lease(incarnation)
            return
        if isinstance(answer, RegisterAnswer):
            await self._watch_lease(answer.incarnation)
        self._step(answer)

    async def _publish(self, load: instance_pb2.InstanceLoad) -> None:
        """Reports tiers of models, and running requests."""
        token_s = self.machine.expectations.token_s(load.active_model)
        runs = running_report(self.machine.runs, self._held, now_s=self._now_s(), token_s=token_s)
        failing = bool(self.machine.model_swap.failing)
        await self._calls.publish(load.active_model, load.swapping_to, load.warm_models, load.batch, runs, failing=failing)

    async def _watch_profiles(self) -> None:
        await watch_profiles(self._queue, self.facts, self._profiles, self._hardware, self._step)

    # The lease --------------------------------------------------------------------------------------------------------

    async def _watch_lease(self, incarnation: str) -> None:
        assert self._group is not None
        assert self._calls.keeper is not None
        await self._end_watch()
        structlog.get_logger().info("registered", incarnation=incarnation)
        self._lease_watch = self._group.create_task(self._lease_lost(self._calls.keeper, incarnation), name="lease")

    async def _lease_lost(self, keeper: LeaseKeeper, incarnation: str) -> None:
        await keeper.lost.wait()
        self._lose_lease(incarnation)

    def _lose_lease(self, incarnation: str) -> None:
        if self.machine.life is Life.SERVING and incarnation == self.machine.incarnation:
            structlog.get_logger().warning("incarnation_ends", incarnation=incarnation, owned=len(self.machine.runs))
            self._telemetry.metrics.lease_losses.inc()
        self._step(LeaseLoss(incarnation=incarnation))

    async def _end_watch(self) -> None:
        watch, self._lease_watch = self._lease_watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait([watch])

    async def _end_lease(self) -> None:
        await self._end_watch()
        await self._calls.stop()
