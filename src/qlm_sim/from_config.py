"""Describes the cluster of a configuration file, with the settings that its processes would read themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qlm_agent.config import AgentConfig, AgentSettings, served_models
from qlm_core.shipped_profiles import shipped_snapshot
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
    return ClusterDescription(
        models=tuple(model.spec() for model in models),
        instances=tuple(_instance(config.agent, tuple(served_models(config, shipped_snapshot()))) for config in configs),
        gateways=gateways,
        planners=planners,
    )


def policy_of(path: str, overrides: Mapping[str, object]) -> Policy:
    """The policy that the file's planner follows. Raises ConfigError."""
    return load_config(PlannerConfig, path, overrides=overrides).policy()


def _instance(agent: AgentSettings, models: tuple[str, ...]) -> InstanceDescription:
    engine = agent.simulated
    return InstanceDescription(
        name=agent.name,
        gpu=agent.gpu,
        n_gpu=agent.n_gpu,
        models=models,
        time_scale=engine.time_scale,
        batch_max=agent.batch_max,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        host_memory_gb=engine.host_memory_gb,
        host_kv_gb=engine.host_kv_gb,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        tell_every_s=engine.tell_every_s,
        step_noise=engine.step_noise,
        bias_max=engine.bias_max,
        lookahead_requests=agent.lookahead_requests,
        coalesce_s=agent.coalesce_s,
        buffer_tokens_max=agent.buffer_tokens_max,
        poll_s=agent.poll_s,
        slo_band=agent.slo_band,
        evict=agent.evict,
        kv_swap=agent.kv_swap,
        warm_ahead=agent.warm_ahead,
        displacements_max=agent.displacements_max,
        offloaded_max_s=agent.offloaded_max_s,
        operations=agent.operations,
        drain_finish_s=agent.drain_finish_s,
        heartbeat_s=agent.heartbeat_s,
    )
