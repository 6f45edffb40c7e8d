"""Carries out the weather of a run on its cluster, and counts the work under way that each fault hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import assert_never

from qlm_sim.cluster import START_S, Cluster, Member
from qlm_sim.processes.agent import SimAgent
from qlm_sim.processes.estimator import SimEstimator
from qlm_sim.processes.gateway import SimGateway
from qlm_sim.processes.planner import SimPlanner
from qlm_sim.storms.weather import AMBUSH_S, Fault, Strike, Weather
from qlm_sim.world.network import CALM
from qlm_sim.world.process import Process
from qlm_sim.world.server import Condition

SLOWEST_ENGINE = 12.0
"""Most times longer that a straggler takes."""

SLOWEST_SERVER_S = 0.02
BREAKS_MAX = 0.3
REVIVE_EVERY_S = 0.5
"""A process that stopped by itself (a drained agent) is restarted by then, as an operator's supervisor does."""

SERVER_FAULTS = (Fault.STALL_SERVER, Fault.SLOW_SERVER, Fault.KILL_SERVER)

Meetings = Counter[tuple[str, str]]
"""(kind of fault, work under way) -> how often they met."""


class Storm:
    """`meetings` grows as faults happen."""

    def __init__(self, cluster: Cluster, weather: Weather, meetings: Meetings) -> None:
        self._cluster = cluster
        self._weather = weather
        self._meetings = meetings
        self._over = False
        self._doubles: dict[SimAgent, None] = {}
        self._ambushes: dict[Strike, Member] = {}

    def begin(self) -> None:
        self._cluster.network.settings = self._weather.network
        self._cluster.site.on_step = self._stepped
        for strike in self._weather.strikes:
            self._cluster.schedule.at(START_S + strike.at_s, lambda strike=strike: self._strike(strike))  # type: ignore[misc]
        self._cluster.schedule.at(START_S + self._weather.trouble_s, self._calm)
        self._cluster.schedule.after(REVIVE_EVERY_S, self._revive_drained)

    def _strike(self, strike: Strike) -> None:
        if strike.ambush:
            self._ambushes[strike] = self._victim(strike)
            self._cluster.schedule.after(AMBUSH_S, partial(self._spring, strike))
        elif strike.fault in SERVER_FAULTS:
            self._strike_server(strike)
        elif isinstance(member := self._victim(strike), SimAgent):
            self._strike_agent(strike, member)
        else:
            self._strike_process(strike, member)

    def _victim(self, strike: Strike) -> Member:
        """By the fault's last word, which is an agent's part where it names no process."""
        cluster = self._cluster
        others: dict[str, Sequence[Member]] = {
            "planner": cluster.planners,
            "estimator": cluster.estimators,
            "gateway": cluster.gateways,
        }
        members = others.get(strike.fault.rpartition(" ")[2], cluster.agents)
        return members[strike.victim % len(members)]

    # Ambushes ---------------------------------------------------------------------------------------------------------

    def _stepped(self, process: Process, effects: Sequence[object]) -> None:
        """Ambushes on one of these calls strike once it is sent."""
        for strike, victim in self._ambushes.items():
            if victim.process is process and any(type(effect).__name__ == strike.ambush for effect in effects):
                self._cluster.schedule.after(0.0, partial(self._spring, strike))

    def _spring(self, strike: Strike) -> None:
        if self._ambushes.pop(strike, None) is not None:
            self._strike(replace(strike, ambush=""))

    # Processes --------------------------------------------------------------------------------------------------------

    def _strike_process(self, strike: Strike, member: Member) -> None:
        process = member.process
        if not process.alive or process.frozen:
            return
        self._met(strike.fault, process, under_way(member))
        match strike.fault.partition(" ")[0]:
            case "kill":
                if isinstance(member, SimGateway):
                    member.kill()
                else:
                    process.end()
                self._later(strike, lambda: self._revive(member))
            case "freeze":
                epoch = process.epoch
                process.freeze()
                self._later(strike, lambda: process.thaw() if process.epoch == epoch else None)
            case "cut":
                self._cluster.network.cut_off(process.name)
                self._later(strike, lambda: self._cluster.network.reconnect(process.name))

    def _strike_agent(self, strike: Strike, agent: SimAgent) -> None:
        match strike.fault:
            case Fault.DRAIN_AGENT if agent.process.alive and not agent.process.frozen:
                self._met(strike.fault, agent.process, under_way(agent))
                agent.drain(strike.for_s)
            case Fault.DOUBLE_AGENT:
                self._met(strike.fault, agent.process, under_way(agent))
                double = self._cluster.second_process(agent)
                self._doubles[double] = None
                double.start()
                self._later(strike, double.process.end)
            case Fault.SLOW_ENGINE:
                self._met(strike.fault, agent.process, under_way(agent))
                agent.set_slowness(1.0 + (SLOWEST_ENGINE - 1.0) * strike.severity)
                self._later(strike, lambda: agent.set_slowness(1.0))
            case Fault.BREAK_RUNS:
                self._met(strike.fault, agent.process, under_way(agent))
                agent.engine.breaks = BREAKS_MAX * strike.severity
                self._later(strike, lambda: _mend(agent))
            case _:
                self._strike_process(strike, agent)

    def _revive(self, member: Member) -> None:
        if not member.process.alive:
            self._say(member.process.name, "is started")
            member.start()

    def _revive_drained(self) -> None:
        for agent in self._cluster.agents:
            if agent.drained and not agent.process.alive:
                agent.drained = False
                self._revive(agent)
        self._cluster.schedule.after(REVIVE_EVERY_S, self._revive_drained)

    # The server -------------------------------------------------------------------------------------------------------

    def _strike_server(self, strike: Strike) -> None:
        server = self._cluster.server
        if server.condition is not Condition.UP or server.slow_s:
            return
        for member in self._cluster.members:
            if member.process.alive:
                self._met(strike.fault, member.process, under_way(member))
        match strike.fault:
            case Fault.STALL_SERVER:
                server.stall()
            case Fault.KILL_SERVER:
                server.kill()
            case _:
                server.slow_s = SLOWEST_SERVER_S * strike.severity
        self._later(strike, self._mend_server)

    def _mend_server(self) -> None:
        server = self._cluster.server
        server.slow_s = 0.0
        if server.condition is not Condition.UP:
            self._say("server", "is up")
            server.recover()

    # The end ----------------------------------------------------------------------------------------------------------

    def _calm(self) -> None:
        """Ends all faults, and restarts stopped processes."""
        self._say("storm", "is over")
        self._over = True
        self._ambushes.clear()
        cluster = self._cluster
        cluster.network.settings = CALM
        self._mend_server()
        for double in self._doubles:
            double.process.end()
        for agent in cluster.agents:
            agent.set_slowness(1.0)
            _mend(agent)
        for member in cluster.members:
            cluster.network.reconnect(member.process.name)
            member.process.thaw()
            self._revive(member)

    def _later(self, strike: Strike, end: object) -> None:
        assert callable(end)
        self._cluster.schedule.after(strike.for_s, lambda: None if self._over else end())

    def _met(self, fault: Fault, process: Process, work: Sequence[str]) -> None:
        self._say(process.name, f"{fault} during {', '.join(work)}")
        for each in work:
            self._meetings[(fault, each)] += 1

    def _say(self, process: str, text: str) -> None:
        if self._cluster.transcript.on:
            self._cluster.transcript.line(self._cluster.schedule.now_s, process, f"*** {text}")


def _mend(agent: SimAgent) -> None:
    agent.engine.breaks = 0.0


def under_way(member: Member) -> list[str]:
    """A process's work under way, in the words of the counters; "idle" for none."""
    work: dict[str, None] = {}
    match member:
        case SimAgent():
            work |= dict.fromkeys(f"agent {name}" for name in member.calls_under_way.values())
            work |= dict.fromkeys(f"run {run.phase.value}" for run in member.machine.runs.all())
            if member.machine.model_swap.swapping_to:
                work["agent model swap"] = None
            if member.machine.paused:
                work["agent paused"] = None
            if member.machine.draining:
                work["agent draining"] = None
            work[f"agent {member.machine.life.value}"] = None
        case SimPlanner():
            work |= dict.fromkeys(f"planner {name}" for name in member.calls_under_way)
            work["planner leads" if member.machine is not None else "planner stands by"] = None
        case SimGateway():
            work |= dict.fromkeys(f"gateway {name}" for name in member.open_calls.values())
        case SimEstimator():
            work["estimator"] = None
        case _:
            assert_never(member)
    return list(work) or ["idle"]
