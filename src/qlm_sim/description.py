"""Describes a simulated cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from qlm_agent.config import AgentSettings
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_queue.values import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDescription:
    """One agent and its engine. `agent`: its settings, as a live one reads them, `models` named. `owned_check_s`: as in MachineSettings.
    `wake_min_s`: least time between two polls of the engine."""

    agent: AgentSettings
    owned_check_s: float = 15.0
    wake_min_s: float = 0.002

    @property
    def name(self) -> str:
        return self.agent.name

    def changed(self, agent: Mapping[str, object], simulated: Mapping[str, object]) -> InstanceDescription:
        """With these settings of the agent and of its engine in place of its own; they are not checked."""
        engine = self.agent.simulated.model_copy(update=simulated)
        return replace(self, agent=self.agent.model_copy(update={**agent, "simulated": engine}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    """`planners`, `estimators`: processes of each role, with one leader. `clock_skew_max_s`: largest error of a process's estimate of the
    server's clock. `profiles`: of its GPUs, None for those shipped with QLM. `stream_buffer_tokens_max`: of a gateway, for a slow reader.
    `predictions`: whether waits are published and clients get theirs. They decide only refusals for lateness, and take half of the time."""

    models: tuple[ModelSpec, ...]
    instances: tuple[InstanceDescription, ...]
    gateways: int = 1
    planners: int = 1
    estimators: int = 1
    bounds: Bounds = field(default_factory=Bounds)
    lease_ttl_s: float = 3.0
    lease_renew_s: float = 1.0
    profiles_every_s: float = 1.0
    clock_skew_max_s: float = 0.0
    stream_buffer_tokens_max: int = 4_096
    predictions: bool = True
    profiles: ProfileSnapshot | None = None
