"""Shared state of the processes of one simulated cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import cast

from opentelemetry.trace import NoOpTracerProvider, TracerProvider

from qlm_agent.telemetry.metrics import AgentMetrics
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_gateway.metrics import GatewayMetrics
from qlm_planner.policy import Policy
from qlm_queue.port import Queue
from qlm_sim.description import ClusterDescription
from qlm_sim.world.chance import Chance
from qlm_sim.world.link import QueueLink
from qlm_sim.world.network import Network
from qlm_sim.world.process import Process
from qlm_sim.world.schedule import Schedule
from qlm_sim.world.transcript import Transcript

QUEUE_NAME = "sim"


@dataclass(slots=True, kw_only=True)
class Site:
    """One per run. `on_step`: called with the effects of every step of an agent's or planner's machine, before they are carried out;
    `effects` then counts them, by kind and cause."""

    description: ClusterDescription
    schedule: Schedule
    network: Network
    chance: Chance
    transcript: Transcript
    shipped: ProfileSnapshot
    planner_policy: Policy
    effects: Counter[str] = field(default_factory=Counter)
    on_step: Callable[[Process, Sequence[object]], None] | None = None
    tracing: TracerProvider = field(default_factory=NoOpTracerProvider)
    agent_metrics: AgentMetrics = field(default_factory=AgentMetrics)
    gateway_metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    _numbers: count[int] = field(default_factory=lambda: count(1))

    @property
    def catalogue(self) -> Mapping[str, ModelSpec]:
        return {model.name: model for model in self.description.models}

    @property
    def policy(self) -> Policy:
        """The planner's policy, with the cluster's leases, without waits that no gateway reads."""
        described = self.description
        return replace(self.planner_policy, lease_ttl_s=described.lease_ttl_s, publishes_waits=described.predictions)

    def process(self, name: str) -> Process:
        """A process that is not started; its clock is off by up to the description's skew."""
        skew_s = self.description.clock_skew_max_s
        return Process(self.schedule, name, self.chance.part(f"{name}/clock").between(-skew_s, skew_s))

    def link(self, process: Process) -> Queue:
        return cast("Queue", QueueLink(QUEUE_NAME, process, self.network))

    def stepped(self, process: Process, event: object, effects: Sequence[object]) -> None:
        if self.transcript.on:
            self.transcript.step(self.schedule.now_s, process.name, event, effects)
        if self.on_step is None:
            return
        for effect in effects:
            cause = getattr(effect, "cause", None) or getattr(effect, "tier", None)
            self.effects[type(effect).__name__ if cause is None else f"{type(effect).__name__} {cause.value}"] += 1
        self.on_step(process, effects)

    def new_id(self) -> str:
        """Never the same twice in a run."""
        return f"{next(self._numbers):08x}"
