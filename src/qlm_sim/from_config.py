"""Describes the cluster of a configuration file, with the settings that its processes would read themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qlm_agent.config import AgentConfig, served_models
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_planner.config import PlannerConfig
from qlm_planner.policy import Policy
from qlm_process.config import load_config
from qlm_sim.description import ClusterDescription, InstanceDescription


def describe(
    path: str, agents: Sequence[str], overrides: Mapping[str, object], *, gateways: int = 1, planners: int = 1
) -> ClusterDescription:
    """The cluster with the agents of these names. Raises ConfigError as an agent would."""
    configs = [load_config(AgentConfig, path, "agents", name, overrides) for name in agents]
    models = configs[0].models if configs else ()
    shipped = shipped_snapshot()
    return ClusterDescription(
        models=tuple(model.spec() for model in models),
        instances=tuple(_instance(config, shipped) for config in configs),
        gateways=gateways,
        planners=planners,
    )


def policy_of(path: str, overrides: Mapping[str, object]) -> Policy:
    """The policy that the file's planner follows. Raises ConfigError."""
    return load_config(PlannerConfig, path, overrides=overrides).policy()


def _instance(config: AgentConfig, shipped: ProfileSnapshot) -> InstanceDescription:
    served = tuple(served_models(config, shipped))
    return InstanceDescription(agent=config.agent.model_copy(update={"models": served}))
