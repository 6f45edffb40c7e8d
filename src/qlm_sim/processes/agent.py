"""An agent in virtual time: the machine, its calls and its engine driver are the live ones; this module replaces asyncio."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from qlm.internal.v1 import events_pb2
from qlm_agent.config import (
    AgentSettings,
    ServedModel,
    instance_facts,
    machine_settings,
    simulated_limits,
    simulated_models,
    simulated_policy,
)
from qlm_agent.decisions.effects import (
    Complete,
    Deregister,
    Describe,
    DrainAnswer,
    Effect,
    Emit,
    ForgetRun,
    GiveBack,
    LoadAnswer,
    Pull,
    ReadOwned,
    Register,
    Stop,
)
from qlm_agent.decisions.events import AgentStart, CallLost, DrainCommand, Event, LeaseLoss, RegisterAnswer, TimePassed
from qlm_agent.decisions.machine import AgentMachine
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.engines.driver import EngineDriver, EngineEffect
from qlm_agent.engines.simulated.core import SimulatedCore
from qlm_agent.shell.control import control_events
from qlm_agent.shell.reports import GATHER_S, Reporter
from qlm_agent.shell.running_report import running_report
from qlm_agent.shell.server_calls import ServerCalls, ServerEffect
from qlm_agent.telemetry.metrics import AgentTelemetry
from qlm_core.vocabulary.errors import LeaseLost, Unavailable
from qlm_planner.board.slot import EngineLoad
from qlm_planner.machine.events import Event as PlannerEvent
from qlm_planner.machine.events import InstanceAnnounced, LoadReported
from qlm_process.queue.leases import LeaseKeeper
from qlm_queue.values import PLANNER_ROLE, Lease
from qlm_sim.description import InstanceDescription
from qlm_sim.processes.engine import Straggler, VirtualEngine
from qlm_sim.world.leases import SimLeaseKeeper
from qlm_sim.world.process import Process, Task, suspend
from qlm_sim.world.site import Site

SendToPlanner = Callable[[Process, str, PlannerEvent], None]
"""Sends an event from a process to the planner at an address."""


class SimAgent:
    """One instance over all its lives. `calls_under_way`: names of the effects that wait for the server, for counts of faults."""

    def __init__(self, site: Site, description: InstanceDescription, send_to_planner: SendToPlanner) -> None:
        self.process = site.process(description.name)
        self.description = description
        self.drained = False  # it stopped by itself
        self._past_swaps = 0  # of the lives before this one
        self._site = site
        self._send_to_planner = send_to_planner
        self._served = _served(site, description.agent)
        self.settings = replace(machine_settings(description.agent, self._served), owned_check_s=description.owned_check_s)
        self._noise = Straggler(
            seed=site.chance.seed,  # the hidden bias is that of a live engine whose `simulated.seed` is the run's
            instance=description.name,
            step_noise=description.agent.simulated.step_noise,
            bias_max=description.agent.simulated.bias_max,
        )
        self.begin_life()

    def set_slowness(self, factor: float) -> None:
        """Its engine takes so many times longer from now on."""
        self._noise.slowness = factor

    def begin_life(self) -> None:
        """Builds a process's initial state; `start` runs it."""
        site, description = self._site, self.description
        process = self.process
        self.machine = AgentMachine(self.settings)
        self.calls_under_way: dict[int, str] = {}
        self._held: dict[str, HeldRun] = {}
        self._effects: deque[EngineEffect] = deque()
        self._driving = False
        self._queue = site.link(process)
        self._reporter = Reporter(self._queue, site.agent_metrics.dropped_events)
        self._reporting = False
        telemetry = AgentTelemetry(description.name, site.agent_metrics, site.tracing, self._report)
        self.calls = ServerCalls(
            self._queue,
            instance_facts(description.agent, tuple(self._served), f"{description.name}:0"),
            self._held,
            telemetry,
            now_s=process.now_s,
            text_output=False,
            lease_ttl_s=site.description.lease_ttl_s,
            lease_renew_s=site.description.lease_renew_s,
            slo_band=description.agent.slo_band,
            nonce=f"{description.name}-{site.new_id()}",
            engine_clock=process.now_s,
            keep=self._keep,
        )
        policy = simulated_policy(description.agent)
        core = SimulatedCore(simulated_models(self._served), self._noise, policy, simulated_limits(description.agent))
        self.engine = VirtualEngine(
            process,
            core,
            lambda outputs: self._driver.report_outputs(outputs),
            wake_min_s=description.wake_min_s,
            chance=site.chance.part(f"{description.name}/engine/{process.epoch}"),
        )
        self._driver = EngineDriver(
            self.engine,
            self._held,
            telemetry,
            now_s=process.now_s,
            step=self._step,
            engine_clock=process.now_s,
            incarnation=lambda: self.machine.incarnation,
        )

    @property
    def swaps(self) -> int:
        """Model swaps, over all its lives."""
        return self._past_swaps + max(0, self.machine.model_swap.swaps - 1)

    # Life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.process.begin()
        self._past_swaps = self.swaps
        self.begin_life()
        self._alarm = self.process.alarm(lambda: self._step(TimePassed()))
        self._heartbeat = self.process.alarm(self._beat)
        self._sleeper: Task | None = None  # the announcer, between two reports
        self._hurried = False
        after = f"{int(self.process.now_s() * 1000)}-0"
        self.process.spawn(control_events(self._queue, self.description.name, after, self._step, sleep=self.process.sleep))
        self.process.spawn(self._announce())
        self._step(AgentStart())

    def drain(self, finish_s: float) -> None:
        """As by SIGTERM."""
        self._step(DrainCommand(finish_s=finish_s, stop=True))

    # The machine ------------------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        now_s, serves = self.process.now_s(), self.machine.serves
        effects = self.machine.step(now_s, event)
        self._site.stepped(self.process, event, effects)
        for effect in effects:
            self._perform(effect)
        if self.process.alive:
            self._alarm.set(self.machine.next_wakeup_s)
            if self.machine.serves != serves:
                self._hurried = True
                if self._sleeper is not None:
                    self._heartbeat.set(now_s)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Register() | Describe() | Deregister() | Pull() | ReadOwned() | Emit() | Complete() | GiveBack():
                self.calls_under_way[effect.call] = type(effect).__name__
                self.process.spawn(self._call(effect, self.calls.held_by(effect)))
            case ForgetRun():
                del self._held[effect.run_id]
            case DrainAnswer() | LoadAnswer():
                pass  # the simulation makes no such calls
            case Stop():
                self.drained = True
                self.process.end()
            case _:
                self._effects.append(effect)
                if not self._driving:
                    self._driving = True
                    self.process.spawn(self._drive())

    async def _drive(self) -> None:
        while self._effects:
            await self._driver.perform(self._effects.popleft(), self.process.spawn)
        self._driving = False

    async def _call(self, effect: ServerEffect, runs: Sequence[HeldRun]) -> None:
        incarnation = self.calls.facts.incarnation
        try:
            answer = await self.calls.perform(effect, runs)
        except (Unavailable, LeaseLost) as error:
            del self.calls_under_way[effect.call]
            self._step(CallLost(call=effect.call))
            if isinstance(error, LeaseLost):
                self._step(LeaseLoss(incarnation=incarnation))
            return
        del self.calls_under_way[effect.call]
        if isinstance(answer, RegisterAnswer) and self._site.transcript.on:
            self._site.transcript.line(self._site.schedule.now_s, self.process.name, f"is {answer.incarnation}")
        self._step(answer)

    def _keep(self, lease: Lease) -> LeaseKeeper:
        return SimLeaseKeeper(self._site, self.process, self._queue, lease, lambda: self._step(LeaseLoss(incarnation=lease.role)))

    # Events of operations ---------------------------------------------------------------------------------------------

    def _report(self, event: events_pb2.RequestEvent) -> None:
        self._reporter.add(event)
        if not self._reporting:
            self._reporting = True
            self.process.spawn(self._send_reports())

    async def _send_reports(self) -> None:
        """Does the work of `Reporter.run`."""
        await self.process.sleep(GATHER_S)
        self._reporting = False
        await self._reporter.flush()

    # The planner ------------------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Does the work of `Announcer`: announces each incarnation to each leader, and then reports its load."""
        announced = ("", "")
        while True:
            facts, stats = self.calls.facts, self.engine.stats()
            if facts.incarnation:
                swapping_to = self.machine.model_swap.swapping_to
                token_s = self.machine.expectations.token_s(stats.active_model)
                runs = running_report(self.machine.runs, self._held, now_s=self.process.now_s(), token_s=token_s)
                try:
                    await self.calls.publish(stats.active_model, swapping_to, stats.warm_models, self.machine.batch_reported, runs)
                    address = await self._queue.leader_address(PLANNER_ROLE)
                except (Unavailable, LeaseLost):
                    address = ""
                if address and announced != (address, facts.incarnation):
                    self._send_to_planner(self.process, address, InstanceAnnounced(facts=facts))
                    announced = (address, facts.incarnation)
                if address:
                    load = LoadReported(
                        incarnation=facts.incarnation,
                        active_model=swapping_to or stats.active_model,
                        warm_models=tuple(stats.warm_models),
                        batch=self.machine.batch_reported,
                        engine=EngineLoad(
                            kv_used_tokens=stats.kv_used_tokens,
                            kv_capacity_tokens=stats.kv_capacity_tokens,
                            prefill_left_tokens=self.machine.runs.prefill_left_tokens,
                            token_s=token_s,
                        ),
                    )
                    self._send_to_planner(self.process, address, load)
            await suspend(self._sleep)

    def _sleep(self, announcer: Task) -> None:
        self._sleeper = announcer
        self._heartbeat.set(self.process.now_s() + (0.0 if self._hurried else self.description.agent.heartbeat_s))

    def _beat(self) -> None:
        sleeper, self._sleeper, self._hurried = self._sleeper, None, False
        assert sleeper is not None
        sleeper.resume()


def _served(site: Site, agent: AgentSettings) -> dict[str, ServedModel]:
    found: dict[str, ServedModel] = {}
    for name in agent.models:
        profile = site.shipped.hardware_of_pair(agent.gpu, agent.n_gpu, site.catalogue[name])
        assert profile is not None, (agent.gpu, agent.n_gpu, name)
        found[name] = ServedModel(spec=site.catalogue[name], profile=profile)
    return found
