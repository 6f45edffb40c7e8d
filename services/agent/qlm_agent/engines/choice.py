"""Builds the engine that an agent's settings name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from qlm_agent.config import (
    AgentConfig,
    AgentSettings,
    ServedModel,
    served_models,
    simulated_limits,
    simulated_models,
    simulated_policy,
    time_scale,
)
from qlm_agent.engines.port import Engine
from qlm_agent.engines.simulated.engine import SimulatedEngine
from qlm_agent.engines.simulated.timing import InstanceNoise
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEngine:
    """An unstarted engine, and the models that it can serve. `time_scale`: how many times faster than its profile it runs, 1 for real ones.
    `prefill_chunk_tokens`: most prompt tokens of one step, 0 if unknown."""

    engine: Engine
    models: Mapping[str, ServedModel]
    time_scale: float
    prefill_chunk_tokens: int


def engine_of(config: AgentConfig, profiles: ProfileSnapshot, *, clock: Callable[[], float] = time.monotonic) -> AgentEngine:
    """`clock`: a simulated engine's. Raises ConfigError for settings that do not fit each other."""
    models = served_models(config, profiles)
    match config.agent.engine:
        case "simulated":
            engine, chunk = _simulated(config, models, clock)
        case "vllm":
            engine, chunk = _vllm(config, models)
        case "openai":
            engine, chunk = _openai(config.agent, models), 0
    return AgentEngine(engine=engine, models=models, time_scale=time_scale(config.agent), prefill_chunk_tokens=chunk)


def _simulated(config: AgentConfig, models: Mapping[str, ServedModel], clock: Callable[[], float]) -> tuple[Engine, int]:
    agent, simulated = config.agent, config.agent.simulated
    noise = InstanceNoise(seed=simulated.seed, instance=agent.name, step_noise=simulated.step_noise, bias_max=simulated.bias_max)
    engine = SimulatedEngine(simulated_models(models), noise, simulated_policy(agent), simulated_limits(agent), clock=clock)
    return engine, simulated.prefill_chunk_tokens


def _vllm(config: AgentConfig, models: Mapping[str, ServedModel]) -> tuple[Engine, int]:
    agent = config.agent
    for name, model in models.items():
        if model.profile is None:
            structlog.get_logger().warning(
                "profile_unknown",
                model=name,
                gpu=agent.gpu,
                then="nothing is planned for it until `qlm profile` has measured it and `qlm profiles import` has stored the result",
            )
    named = {
        name: VllmModel(
            name=name,
            weights=model.weights,
            context_tokens_max=model.spec.context_tokens_max,
            chat_template=model.chat_template,
            policy=agent.engine_policy,
            policy_options=agent.engine_policy_options,
        )
        for name, model in models.items()
    }
    engine = VllmEngine(named, agent.vllm, batch_max=agent.batch_max, n_gpu=agent.n_gpu)
    return engine, agent.vllm.prefill_chunk_tokens


def _openai(agent: AgentSettings, models: Mapping[str, ServedModel]) -> Engine:
    try:
        from qlm_agent.engines.openai.build import openai_engine
    except ModuleNotFoundError as error:
        raise ConfigError(f"agent.engine: openai needs the package {error.name}: pip install 'qlm-serving[agent]'") from error
    specs = {name: model.spec for name, model in models.items()}
    kv_capacity_tokens = {name: model.profile.kv_capacity_tokens if model.profile is not None else 0 for name, model in models.items()}
    return openai_engine(agent.openai, specs, kv_capacity_tokens, agent.batch_max)
