"""Which engine an agent's settings ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qlm_agent.config import AgentConfig, AgentSettings, simulated_limits, simulated_models
from qlm_agent.engine import Engine
from qlm_agent.engine_policy import FirstComeFirstServed
from qlm_agent.simulated.core import SimulatedModel
from qlm_agent.simulated.engine import SimulatedEngine
from qlm_agent.simulated.timing import InstanceNoise
from qlm_core.errors import ConfigError
from qlm_core.profile import ProfileSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEngine:
    """An engine that was not started, and the models that it can serve. `time_scale`: how many times faster than its profile it runs, 1 for
    real ones. `prefill_chunk_tokens`: prompt tokens that one step takes in at most, 0 where that is not known."""

    engine: Engine
    models: Mapping[str, SimulatedModel]
    time_scale: float
    prefill_chunk_tokens: int


def engine_of(config: AgentConfig, profiles: ProfileSnapshot, *, clock: Callable[[], float] = time.monotonic) -> AgentEngine:
    """`clock`: the engine's. Raises ConfigError for settings that do not fit each other."""
    agent = config.agent
    models = simulated_models(config, profiles)
    if agent.engine == "openai":
        return AgentEngine(engine=_openai(agent, models, clock), models=models, time_scale=1.0, prefill_chunk_tokens=0)
    simulated = agent.simulated
    noise = InstanceNoise(seed=simulated.seed, instance=agent.name, step_noise=simulated.step_noise, bias_max=simulated.bias_max)
    return AgentEngine(
        engine=SimulatedEngine(models, noise, FirstComeFirstServed(), simulated_limits(agent), clock=clock),
        models=models,
        time_scale=simulated.time_scale,
        prefill_chunk_tokens=simulated.prefill_chunk_tokens,
    )


def _openai(agent: AgentSettings, models: Mapping[str, SimulatedModel], clock: Callable[[], float]) -> Engine:
    try:
        from qlm_agent.openai.building import openai_engine
    except ModuleNotFoundError as error:
        raise ConfigError(f"agent.engine: openai needs the package {error.name}: pip install 'qlm-serving[agent]'") from error
    specs = {name: model.spec for name, model in models.items()}
    kv_capacity_tokens = {name: model.profile.kv_capacity_tokens for name, model in models.items()}
    return openai_engine(agent.openai, specs, kv_capacity_tokens, agent.batch_max, clock=clock)
