"""Which engine an agent's settings ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qlm_agent.config import AgentConfig, simulated_limits, simulated_models
from qlm_agent.engine import Engine
from qlm_agent.engine_policy import FirstComeFirstServed
from qlm_agent.simulated.core import SimulatedModel
from qlm_agent.simulated.engine import SimulatedEngine
from qlm_agent.simulated.timing import InstanceNoise
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
    simulated = agent.simulated
    noise = InstanceNoise(seed=simulated.seed, instance=agent.name, step_noise=simulated.step_noise, bias_max=simulated.bias_max)
    return AgentEngine(
        engine=SimulatedEngine(models, noise, FirstComeFirstServed(), simulated_limits(agent), clock=clock),
        models=models,
        time_scale=simulated.time_scale,
        prefill_chunk_tokens=simulated.prefill_chunk_tokens,
    )
