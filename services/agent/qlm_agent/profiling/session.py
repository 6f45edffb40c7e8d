"""One session of `qlm profile`: an agent's engine by itself, without a queue, and its models one after the other."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from qlm_agent.config import AgentConfig
from qlm_agent.engines.choice import AgentEngine, engine_of
from qlm_agent.engines.port import Tier
from qlm_agent.profiling.design import WHOLE, Extent
from qlm_agent.profiling.experiment import Profiler
from qlm_agent.profiling.fitting import fit
from qlm_agent.profiling.rows import ProfiledModel, profiled
from qlm_agent.profiling.runs import ProfilingFailed
from qlm_core.profiles.hardware_prior import model_facts
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.errors import ConfigError, QlmError
from qlm_core.vocabulary.model import ModelSpec

Say = Callable[[str], None]

ANSWER_TIMEOUT_S = 60.0
"""Longest silence of an engine with runs."""


async def profile_engine(
    config: AgentConfig,
    profiles: ProfileSnapshot,
    names: Sequence[str],
    *,
    limit_s: float,
    say: Say,
    clock: Callable[[], float],
    extent: Extent = WHOLE,
) -> list[ProfiledModel]:
    """Measures the models of these names, or one of each profile that the agent serves; `limit_s` for each, of its profile's clock;
    `clock`: the engine's; `extent`: of the experiment. The engine is stopped at the end in any case. Raises ConfigError, and QlmError if
    the engine fails."""
    made = engine_of(_measurable(config), profiles, clock=clock)
    specs = {name: model.spec for name, model in made.models.items()}
    chosen = [specs[name] for name in chosen_models(names, specs)]
    try:
        await made.engine.start()
        return [await _profile(config, profiles, made, spec, limit_s=limit_s, say=say, clock=clock, extent=extent) for spec in chosen]
    finally:
        await made.engine.stop()


def _measurable(config: AgentConfig) -> AgentConfig:
    """Without the caches that make the second of two equal runs cheaper: recomputing would seem free."""
    vllm = config.agent.vllm.model_copy(update={"prefix_caching": False})
    return config.model_copy(update={"agent": config.agent.model_copy(update={"vllm": vllm})})


def chosen_models(names: Sequence[str], specs: Mapping[str, ModelSpec]) -> list[str]:
    """The models of these names, or one of each profile. Raises ConfigError for a name that the agent does not serve."""
    unknown = [name for name in names if name not in specs]
    if unknown:
        raise ConfigError(f"--model {', '.join(unknown)}: not a model of this agent; may be {', '.join(specs)}")
    first = {spec.profile: name for name, spec in reversed(list(specs.items()))}
    return list(dict.fromkeys(names)) or [name for name in specs if name in first.values()]


async def _profile(
    config: AgentConfig,
    profiles: ProfileSnapshot,
    made: AgentEngine,
    spec: ModelSpec,
    *,
    limit_s: float,
    say: Say,
    clock: Callable[[], float],
    extent: Extent,
) -> ProfiledModel:
    agent = config.agent
    say(f"{spec.name} ({spec.profile}) on {agent.n_gpu} x {agent.gpu}: at most about {limit_s / made.time_scale:.0f} s")
    profiler = Profiler(made.engine, spec, clock=clock, time_scale=made.time_scale, limit_s=limit_s, extent=extent)
    try:
        measured = await profiler.measure(ANSWER_TIMEOUT_S, prefix=f"profile-{uuid.uuid4().hex[:8]}")
        measured.prefill_chunk_tokens = made.prefill_chunk_tokens
        before = profiles.hardware_of_pair(agent.gpu, agent.n_gpu, spec)
        facts = spec.facts if spec.facts is not None else model_facts().get(spec.profile)
        found = profiled(
            fit(measured, 0.0 if before is None else before.prefill_ms_per_token_squared),
            measured,
            gpu=agent.gpu,
            n_gpu=agent.n_gpu,
            profile=spec.profile,
            before=before,
            facts=facts,
        )
    except ValueError as error:
        raise ProfilingFailed(f"{spec.name} on {agent.n_gpu} x {agent.gpu}: {error}") from error
    with suppress(QlmError):  # the next model needs its place; an engine with one model keeps it
        await made.engine.load_model(spec.name, Tier.COLD)
    return found


async def until_stopped(
    config: AgentConfig, profiles: ProfileSnapshot, names: Sequence[str], *, limit_s: float, say: Say, stop: asyncio.Event
) -> list[ProfiledModel]:
    """As `profile_engine`; nothing where `stop` is set before it is done."""
    session = asyncio.create_task(
        profile_engine(config, profiles, names, limit_s=limit_s, say=say, clock=time.monotonic), name="profiling-session"
    )
    stopped = asyncio.create_task(stop.wait(), name="profiling-stop")
    try:
        await asyncio.wait([session, stopped], return_when=asyncio.FIRST_COMPLETED)
        return session.result() if session.done() else []
    finally:
        for task in (session, stopped):
            task.cancel()
        await asyncio.wait([session, stopped])
