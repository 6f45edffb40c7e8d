"""Settings of an agent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qlm_agent.decisions.settings import MachineSettings
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.policies.port import EnginePolicy
from qlm_agent.engines.policies.registry import engine_policy
from qlm_agent.engines.port import ModelLoadFailed
from qlm_agent.engines.simulated.batching.prefills import PrefillRule
from qlm_agent.engines.simulated.core import SimulatedLimits, SimulatedModel
from qlm_agent.engines.simulated.timing import BIAS_MAX, STEP_NOISE_MIN
from qlm_agent.engines.vllm.folder import ModelFolder
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_core.profiles.hardware_prior import why_none
from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.instance import BATCH_MAX_DEFAULT, TIME_SCALE_MAX, TIME_SCALE_MIN, InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.slo_rules import PRIORITY_MAX
from qlm_process.settings import Count, GrpcSettings, ListenAddress, Seconds, Section, ServiceConfig


class SimulatedSettings(Section):
    """The simulated engine."""

    time_scale: float = Field(
        1.0, ge=TIME_SCALE_MIN, le=TIME_SCALE_MAX, description="How many times faster than its profile the engine runs."
    )
    seed: int = Field(1, ge=0, description="Seed of its noise and its hidden bias, together with the agent's name.")
    step_noise: float = Field(
        STEP_NOISE_MIN, ge=STEP_NOISE_MIN, le=1.0, description="Relative standard deviation of the duration of a step."
    )
    bias_max: float = Field(
        BIAS_MAX, ge=0, le=BIAS_MAX, description="Most that this engine is faster or slower than its profile, relative."
    )
    prefill_chunk_tokens: Count = Field(2048, description="Prompt tokens that one step takes in at most.")
    prefill: PrefillRule = Field(
        PrefillRule.BESIDE,
        description="How prompts share a step. beside: so many tokens of them beside the decodes; shared: less one token of each decode, "
        "as in vLLM; whole: a prompt in one step, several where all fit.",
    )
    pipeline_stages: Count = Field(
        1,
        description="Stages of a pipeline, each with its share of layers and GPUs, and as many batches in flight; divides n_gpu.",
    )
    host_memory_gb: float = Field(64.0, ge=0, allow_inf_nan=False, description="Host memory for the weights of warm models, in GB.")
    host_kv_gb: float = Field(
        16.0, ge=0, allow_inf_nan=False, description="Host memory beside it for the KV of requests that make room, in GB; 0: for none."
    )
    kv_capacity_tokens: int = Field(0, ge=0, description="Tokens of KV; 0: as the profile says.")
    tell_every_s: Seconds = Field(0.02, description="How often running requests hand out their tokens.")
    shared_prefix_tokens: int = Field(
        0, ge=0, description="Tokens with which all prompts of a model begin, computed once while it is active, then in the prefix cache."
    )


class AgentSettings(Section):
    """One agent: an engine and its GPUs."""

    name: str = Field("agent-0", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$", description="The instance's name in its queue.")
    listen: ListenAddress = Field("127.0.0.1:0", description="Where its Agent service listens; port 0: any free one.")
    advertise: str = Field("", description="Its address as others see it; empty: the host of listen, with the bound port.")
    gpu: str = Field("A100-80GB", min_length=1, description="GPU, as in the hardware profiles.")
    n_gpu: Count = Field(1, description="GPUs of this instance, as in the hardware profiles.")
    engine: Literal["simulated", "vllm", "openai"] = Field("simulated", description="Source of the tokens.")
    models: tuple[str, ...] = Field((), description="Models that it serves. Empty: all that have a profile on its GPUs.")
    batch_max: Count = Field(BATCH_MAX_DEFAULT, description="Most requests that run at once.")
    batch: Literal["auto", "slo", "max"] = Field(
        "auto",
        description="slo: fewer than batch_max run at once where more would be too slow for their SLOs; max: never; auto: slo under "
        "planner.policy slo, max under the others.",
    )
    lookahead_requests: int = Field(
        0, ge=0, le=10_000, description="Requests pulled beyond those that run, for the engine's policy to order."
    )
    engine_policy: str = Field(
        "",
        pattern=r"^$|^[a-z+-]+$|^[A-Za-z0-9_.]+:[A-Za-z0-9_]+$",
        description="Who holds seats and KV inside the engine: a name of docs/reference/engine-policies.md or module:Class; empty: fcfs on "
        "the simulated engine, edf on vLLM.",
    )
    engine_policy_options: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Keyword arguments of that policy."
    )
    coalesce_s: float = Field(0.05, ge=0, le=1.0, description="Longest that output waits for more; first and last output never wait.")
    buffer_tokens_max: Count = Field(500_000, description="Output tokens held while the server is away; there the engine pauses.")
    poll_s: Seconds = Field(1.0, description="How often an idle agent polls its virtual queue.")
    evict: bool = Field(True, description="Whether running requests make room for more urgent ones that would be late.")
    kv_swap: bool = Field(True, description="Whether their KV may go to host memory, where that costs less than computing it again.")
    warm_ahead: bool = Field(True, description="Whether models are loaded into host memory before their turn.")
    displacements_max: int = Field(3, ge=0, le=100, description="How often a request makes room for others; then it is left to finish.")
    offloaded_max_s: Seconds = Field(
        300.0, description="After so long in host memory a request is served before anything that waits in the queue."
    )
    slo_band: int = Field(
        0, ge=-PRIORITY_MAX, le=PRIORITY_MAX, description="Priority band of requests with an SLO: the same as planner.slo_band."
    )
    drain_finish_s: float = Field(20.0, ge=0, le=3600, description="How long running requests may go on when the agent stops.")
    heartbeat_s: Seconds = Field(1.0, description="How often the load is reported to the planner; model swaps at once.")
    simulated: SimulatedSettings = Field(default_factory=SimulatedSettings, description="The simulated engine.")
    vllm: VllmSettings = Field(default_factory=VllmSettings, description="vLLM.")
    openai: OpenAiSettings = Field(default_factory=OpenAiSettings, description="Engine openai: a server of OpenAI's completions API.")

    grpc: GrpcSettings = Field(default_factory=GrpcSettings, description="Limits of its server.")


class FollowedPolicy(BaseModel):
    """The planner's setting that `agent.batch: auto` follows."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    policy: str = "slo"


class AgentConfig(ServiceConfig):
    """The parts of the configuration file that an agent reads."""

    agent: AgentSettings = Field(default_factory=AgentSettings, description="This agent.")
    planner: FollowedPolicy = Field(default_factory=FollowedPolicy, exclude=True)

    @model_validator(mode="after")
    def _batch(self) -> AgentConfig:
        if self.agent.batch != "auto":
            return self
        batch = "slo" if self.planner.policy == "slo" else "max"
        return self.model_copy(update={"agent": self.agent.model_copy(update={"batch": batch})})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that an agent serves. `profile`: on its GPUs, None where nothing is known of the pair. `weights`, `chat_template`: as in
    ModelSettings."""

    spec: ModelSpec
    profile: HardwareProfile | None
    weights: str = ""
    chat_template: str = ""


def served_models(config: AgentConfig, profiles: ProfileSnapshot) -> Mapping[str, ServedModel]:
    """The models that the agent serves, with their profiles: measured rows for its GPUs, or rows derived from facts. Without names, it
    serves models with a profile; a real engine serves models with weights, profile or not. Raises ConfigError for a model outside the
    catalogue, for a simulated model without a profile, and if no model is left."""
    agent = config.agent
    simulated = agent.engine == "simulated"
    catalogue = {model.name: model for model in config.models}
    unknown = [name for name in agent.models if name not in catalogue]
    if unknown:
        raise ConfigError(f"agent.models: {', '.join(unknown)} not in models; may be {', '.join(catalogue) or 'none: models is empty'}")
    found: dict[str, ServedModel] = {}
    for name in agent.models or tuple(catalogue):
        model = catalogue[name]
        spec = model.spec()
        row = profiles.hardware_of_pair(agent.gpu, agent.n_gpu, spec)
        if row is not None or (not simulated and (agent.models or model.weights)):
            found[name] = ServedModel(spec=spec, profile=row, weights=model.weights, chat_template=model.chat_template)
        elif agent.models:
            why = why_none(agent.gpu, agent.n_gpu, spec.profile, spec.facts)
            raise ConfigError(f"agent.gpu: no profile of {spec.profile} on {agent.n_gpu} x {agent.gpu}: {why}")
    if not found:
        raise ConfigError(f"agent.models: no model of models has a profile on {agent.n_gpu} x {agent.gpu}")
    return found


def simulated_models(models: Mapping[str, ServedModel]) -> dict[str, SimulatedModel]:
    """The models that the simulated engine can serve: it needs their profiles."""
    return {name: SimulatedModel(spec=model.spec, profile=model.profile) for name, model in models.items() if model.profile is not None}


def simulated_limits(agent: AgentSettings) -> SimulatedLimits:
    """The simulated engine's limits, from the settings. Raises ConfigError for stages that do not divide the GPUs."""
    if agent.n_gpu % agent.simulated.pipeline_stages:
        raise ConfigError(
            f"agent.simulated.pipeline_stages divides agent.n_gpu, got {agent.simulated.pipeline_stages} of {agent.n_gpu} GPUs"
        )
    return SimulatedLimits(
        time_scale=agent.simulated.time_scale,
        batch_max=agent.batch_max,
        prefill_chunk_tokens=agent.simulated.prefill_chunk_tokens,
        prefill=agent.simulated.prefill,
        pipeline_stages=agent.simulated.pipeline_stages,
        host_memory_gb=agent.simulated.host_memory_gb,
        host_kv_gb=agent.simulated.host_kv_gb,
        kv_capacity_tokens=agent.simulated.kv_capacity_tokens,
        tell_every_s=agent.simulated.tell_every_s,
        shared_prefix_tokens=agent.simulated.shared_prefix_tokens,
    )


def simulated_policy(agent: AgentSettings) -> EnginePolicy:
    """The simulated engine's policy. Raises ConfigError for an unknown one."""
    try:
        return engine_policy(agent.engine_policy or "fcfs", agent.engine_policy_options)
    except ValueError as problem:
        raise ConfigError(f"agent.engine_policy: {problem}") from problem


def time_scale(agent: AgentSettings) -> float:
    """How many times faster than its profile the engine runs: 1 for real ones."""
    return agent.simulated.time_scale if agent.engine == "simulated" else 1.0


def machine_settings(agent: AgentSettings, models: Mapping[str, ServedModel]) -> MachineSettings:
    """The machine's settings, from the agent's."""
    scale = time_scale(agent)
    return MachineSettings(
        models=tuple(models),
        batch_max=agent.batch_max,
        lookahead_requests=agent.lookahead_requests,
        coalesce_s=agent.coalesce_s,
        buffer_tokens_max=agent.buffer_tokens_max,
        poll_s=agent.poll_s,
        drain_finish_s=agent.drain_finish_s,
        hardware={name: model.profile.scaled(scale) for name, model in models.items() if model.profile is not None},
        weights_gb=_weights_gb(agent, models),
        host_memory_gb=_host_memory_gb(agent),
        host_kv_apart=agent.engine == "vllm",
        slo_band=agent.slo_band,
        evict=agent.evict,
        kv_swap=agent.kv_swap,
        warm_ahead=agent.warm_ahead,
        displacements_max=agent.displacements_max,
        offloaded_max_s=agent.offloaded_max_s,
        batch_by_slo=agent.batch != "max",
    )


def _weights_gb(agent: AgentSettings, models: Mapping[str, ServedModel]) -> Mapping[str, float]:
    """vLLM models count by file size, as vLLM does; a smaller figure would make two warm models evict each other for ever. A model with
    unreadable files fails at its load."""
    found: dict[str, float] = {}
    for name, model in models.items() if agent.engine == "vllm" else ():
        with suppress(ModelLoadFailed):
            found[name] = ModelFolder.read(name, model.weights).weights_bytes / 1e9
    return found


def _host_memory_gb(agent: AgentSettings) -> float:
    match agent.engine:
        case "simulated":
            return agent.simulated.host_memory_gb
        case "vllm":
            return agent.vllm.host_memory_gb
        case "openai":
            return math.inf  # a server does not report it; it refuses a load that is too much


def instance_facts(agent: AgentSettings, models: tuple[str, ...], address: str) -> InstanceFacts:
    """The instance as it is registered; the incarnation is not known yet."""
    return InstanceFacts(
        name=agent.name,
        incarnation="",
        gpu=agent.gpu,
        n_gpu=agent.n_gpu,
        engine=agent.engine,
        models=models,
        address=address,
        time_scale=time_scale(agent),
        batch_max=agent.batch_max,
        lookahead_requests=agent.lookahead_requests,
    )
