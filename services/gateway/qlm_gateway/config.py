"""Settings of a gateway."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.overload import Overload
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_core.vocabulary.slo_rules import SECONDS_MIN, SLO_S_MAX
from qlm_gateway.admission.catalogue import ModelEntry
from qlm_gateway.admission.rules import AdmissionLimits
from qlm_gateway.batches.settings import BatchSettings
from qlm_gateway.front.http.settings import HttpSettings
from qlm_gateway.streams.readers import StreamLimits
from qlm_gateway.text.model_text import ModelText, open_text
from qlm_process.settings import Count, GrpcSettings, ListenAddress, ModelSettings, Seconds, Section, ServiceConfig


class GatewaySettings(Section):
    """One gateway."""

    name: str = Field("gateway-0", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$", description="Its name in logs and metrics.")
    listen: ListenAddress = Field("127.0.0.1:50051", description="Where clients reach it; port 0: any free one.")
    default_slo_s: float = Field(60.0, ge=SECONDS_MIN, le=SLO_S_MAX, description="Completion SLO of requests that name none, in seconds.")
    prompt_bytes_max: Count = Field(4 << 20, description="Largest prompt in bytes of UTF-8, before tokens are counted.")
    streams_max: Count = Field(10_000, description="Open streams and waits for an end; more are refused with RESOURCE_EXHAUSTED.")
    stream_buffer_tokens_max: Count = Field(4096, description="Tokens kept for a reader that is slower than its request.")
    stream_buffers_tokens_max: Count = Field(1_000_000, description="Tokens kept for all readers together.")
    stream_stall_s: Seconds = Field(5.0, description="How long tokens are kept for a reader that does not take them; it reads them later.")
    stream_poll_s: Seconds = Field(0.5, description="Period of polls of a request whose frames go to another gateway.")
    stream_recheck_s: Seconds = Field(3.0, description="Silence after which a stream is polled, in case frames were lost.")
    stream_patience_s: Seconds = Field(60.0, description="How long open streams outlive a queue server that is away.")
    drain_grace_s: Seconds = Field(20.0, description="How long open streams may go on when the gateway stops.")
    grpc: GrpcSettings = Field(default_factory=GrpcSettings, description="Limits of its server.")
    batches: BatchSettings = Field(default_factory=BatchSettings, description="Files and batches of the OpenAI API.")
    http: HttpSettings = Field(default_factory=HttpSettings, description="The OpenAI API over HTTP (docs/reference/http.md).")

    def admission_limits(self) -> AdmissionLimits:
        slo = Slo(kind=SloKind.COMPLETION, seconds=self.default_slo_s)
        return AdmissionLimits(default_slo=slo, prompt_bytes_max=self.prompt_bytes_max)

    def stream_limits(self) -> StreamLimits:
        return StreamLimits(
            readers_max=self.streams_max,
            buffer_tokens_max=self.stream_buffer_tokens_max,
            buffers_tokens_max=self.stream_buffers_tokens_max,
            stall_s=self.stream_stall_s,
            poll_s=self.stream_poll_s,
            recheck_s=self.stream_recheck_s,
            patience_s=self.stream_patience_s,
        )


class PlannerChoices(BaseModel):
    """The part of the section `planner` that a gateway reads; the planner checks all of it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    overload: Overload = Field(Overload.BEST_EFFORT, description="refuse: the gateway refuses what would be late.")


class GatewayConfig(ServiceConfig):
    """The part of the configuration file that a gateway reads."""

    gateway: GatewaySettings = Field(default_factory=GatewaySettings, description="This gateway.")
    planner: PlannerChoices = Field(default_factory=PlannerChoices, description="The fallback under overload.")


def open_texts(models: tuple[ModelSettings, ...]) -> Mapping[str, ModelText]:
    """Tokenizers and templates of the served models, by name. Raises ConfigError for a file that cannot be read or a name given twice."""
    texts: dict[str, ModelText] = {}
    for model in models:
        if model.name in texts:
            raise ConfigError(f"models: {model.name!r} is given twice")
        texts[model.name] = open_text(model.tokenizer, model.chat_template)
    return texts


def catalogue_of(models: tuple[ModelSettings, ...], texts: Mapping[str, ModelText]) -> Mapping[str, ModelEntry]:
    """The served models as admission sees them, in the order of the settings."""
    return {
        model.name: ModelEntry(
            spec=model.spec(),
            exact=texts[model.name].exact,
            token_bytes_max=texts[model.name].token_bytes_max,
        )
        for model in models
    }


def aliases_of(models: tuple[ModelSettings, ...]) -> Mapping[str, str]:
    """Alias -> name of its model. Raises ConfigError for one that is given twice or is a model's name."""
    aliases: dict[str, str] = {}
    names = {model.name for model in models}
    for model in models:
        for alias in model.aliases:
            if not alias or alias in aliases or alias in names:
                raise ConfigError(f"models.aliases: {alias!r} of {model.name!r} is empty, given twice, or the name of a model")
            aliases[alias] = model.name
    return aliases
