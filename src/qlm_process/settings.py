"""The sections of the configuration that every process shares. Each service adds its own beside them."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qlm.credentials import Credentials, read_key
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.model import ModelFacts, ModelSpec
from qlm_queue.values import Bounds, Durability

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite duration above zero."""

PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite number above zero."""

ByteCount = Annotated[int, Field(ge=0)]
"""A whole number of bytes."""

Count = Annotated[int, Field(ge=1)]
"""A whole number of at least one."""

PORT = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
"""0 to 65535: grpc takes what is above modulo 65536."""

ListenAddress = Annotated[str, Field(pattern=rf"^(.+:{PORT}|unix:.+)$")]
"""Where a gRPC server listens: "host:port" (port 0: any free one) or "unix:path"."""


class Section(BaseModel):
    """Base of all settings: frozen, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BoundsSettings(Section):
    """Limits of one queue (`qlm_queue.values.Bounds`)."""

    queue_max: Count = Field(500_000, description="Most live requests of the queue.")
    tenant_max: Count = Field(250_000, description="Most live requests of one tenant.")
    class_max: Count = Field(400_000, description="Most live requests of one SLO class.")
    queue_bytes_max: ByteCount = Field(
        8_000_000_000,
        description="Most bytes that live requests (record, prompt, output so far) and results in their window hold; 0: no bound. "
        "The default is half of a server of 16 GB, whose copy for a rewrite of its log takes the other half.",
    )
    tenant_bytes_max: ByteCount = Field(4_000_000_000, description="Most bytes of one tenant; 0: no bound. By default half of the queue's.")
    class_bytes_max: ByteCount = Field(
        6_400_000_000, description="Most bytes of one SLO class; 0: no bound. By default four fifths of the queue's."
    )
    attempts_max: Count = Field(3, description="Failed attempts after which a request ends FAILED; evictions and lost agents do not count.")
    pulls_max: Count = Field(100, description="Attempts of any kind after which a request that was lost with its agent ends FAILED.")
    result_ttl_s: Seconds = Field(3600.0, description="How long a result is kept, and its request id stands for it.")
    frames_max: Count = Field(20_000, description="Entries of a gateway's frame stream.")
    frames_ttl_s: Seconds = Field(60.0, description="How long the frame stream of a gateway that is gone is kept.")
    control_max: Count = Field(10_000, description="Entries of an agent's control stream.")
    events_max: Count = Field(50_000, description="Entries of the event stream.")
    memory_share: float = Field(
        0.8, gt=0, lt=1, description="Share of the server's maxmemory above which nothing is accepted; the rest is for what was accepted."
    )
    disk_share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of its disk (its own bytes and the free ones) that the server's log of writes may take; above it nothing is "
        "accepted, where the server is on this machine. By default half: a rewrite of the log takes up to the other half.",
    )

    def bounds(self) -> Bounds:
        """These limits as the queue takes them."""
        return Bounds(**self.model_dump())


class QueueSettings(Section):
    """The queue that a process works on."""

    name: str = Field("default", min_length=1, max_length=64, description="Name of the queue; a server can hold many.")
    url: str = Field(
        "",
        pattern=r"^$|^(rediss?(\+(sentinel|cluster))?|unix)://.+$",
        description="Server of the queue: redis://, rediss:// or unix://; redis+sentinel://HOST:PORT,HOST:PORT/MASTER for the primary that "
        "Sentinels name, redis+cluster://HOST:PORT,HOST:PORT for the queue's node of a Cluster (both with rediss too). Empty: the embedded "
        "server, which `qlm up` starts.",
    )
    state_dir: str = Field("qlm-state", min_length=1, description="Folder of the embedded server's data and of `qlm up`'s state file.")
    durability: Durability = Field(
        Durability.PROCESS,
        description="What an answered call survives: a killed process, a power loss (disk), or the loss of the server (replica).",
    )
    replicas: Count = Field(1, description="With durability `replica`: how many replicas have what is answered.")
    replica_wait_s: Seconds = Field(
        1.0, description="How long a call waits for them; then it is UNAVAILABLE, and may be sent again. Below call_timeout_s."
    )
    bounds: BoundsSettings = Field(default_factory=BoundsSettings, description="Limits of the queue.")
    lease_ttl_s: Seconds = Field(3.0, description="Life of a lease that is not renewed.")
    lease_renew_s: Seconds = Field(1.0, description="Time between two renewals; below lease_ttl_s.")
    call_timeout_s: Seconds = Field(2.0, description="Deadline of one call to the server.")

    @model_validator(mode="after")
    def _renews_in_time(self) -> QueueSettings:
        if self.lease_renew_s >= self.lease_ttl_s:
            raise ValueError(f"lease_renew_s ({self.lease_renew_s}) must be below lease_ttl_s ({self.lease_ttl_s})")
        if self.durability is Durability.REPLICA and not self.url:
            raise ValueError("durability replica needs a url: the embedded server has no replicas")
        if self.durability is Durability.REPLICA and self.replica_wait_s >= self.call_timeout_s:
            raise ValueError(f"replica_wait_s ({self.replica_wait_s}) must be below call_timeout_s ({self.call_timeout_s})")
        return self


class ModelFactsSettings(Section):
    """Published shape of a model, for GPUs on which it was never measured (`qlm_core.vocabulary.model.ModelFacts`)."""

    parameters_billion: PositiveNumber = Field(description="Its parameters, in 10^9.")
    active_billion: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Those that one token passes through, in 10^9 (mixture of experts); 0: all."
    )
    layers: Count = Field(description="Layers of its transformer.")
    hidden_size: Count = Field(description="Width of a layer.")
    kv_heads: Count = Field(description="Heads whose keys and values are kept.")
    head_size: Count = Field(description="Width of one of them.")

    @model_validator(mode="after")
    def _active_are_some(self) -> ModelFactsSettings:
        if self.active_billion > self.parameters_billion:
            raise ValueError(f"active_billion ({self.active_billion}) must be at most parameters_billion ({self.parameters_billion})")
        return self


class ModelSettings(Section):
    """One served model."""

    name: str = Field(min_length=1, max_length=128, description="What requests call it.")
    aliases: tuple[str, ...] = Field((), description="Other names that requests may call it; gateways put its name in their place.")
    profile: str = Field(min_length=1, description='Its row in the hardware profiles: "Mistral-7B".')
    context_tokens_max: Count = Field(8192, description="Most tokens of prompt and output together.")
    vocabulary_size: Count = Field(32_000, description="Token ids are below this.")
    tokenizer: str = Field("", description="Path of its tokenizer.json. Empty: UTF-8 bytes / 4, for simulated models.")
    chat_template: str = Field("", description="Path of its Jinja chat template. Empty: the one that lies beside its tokenizer.")
    tool_calls: Literal["auto", "none", "hermes", "json"] = Field(
        "auto",
        description="How it writes calls of tools: hermes (<tool_call>), json (the whole answer), none; auto: as its chat template says.",
    )
    weights: str = Field("", description="Folder of its weights, for real engines; empty: none.")
    facts: ModelFactsSettings | None = Field(
        None, description="Its shape, for GPUs on which it was never measured. Absent: that of the profile's name, if QLM knows it."
    )

    def spec(self) -> ModelSpec:
        """The model as decisions see it."""
        return ModelSpec(
            name=self.name,
            profile=self.profile,
            context_tokens_max=self.context_tokens_max,
            vocabulary_size=self.vocabulary_size,
            facts=None if self.facts is None else ModelFacts(**self.facts.model_dump()),
        )


class TelemetrySettings(Section):
    """Logs and metrics. Traces follow the standard OTEL_* variables."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["console", "json"] = Field("console", description="Form of log lines.")
    metrics_host: str = Field("127.0.0.1", min_length=1, description="Where Prometheus metrics are served.")
    metrics_port: int = Field(0, ge=0, le=65_535, description="Their port; 0: any free one, which the `ready` log line names.")


class SecuritySettings(Section):
    """Access and protection of connections (docs/howto/secure.md)."""

    key_file: str = Field("", description="Keys of callers, written by `qlm keys` and read again when it changes. Empty: no keys.")
    no_auth: bool = Field(False, description="Without keys: serves other hosts too, where whoever reaches it may do everything.")
    no_tls: bool = Field(False, description="With keys: serves other hosts without TLS, as behind a proxy that has it.")
    service_key_file: str = Field("", description="A key of role `service`, which agents show to planners.")
    tls_cert_file: str = Field("", description="PEM file of this process's certificate chain. Empty: no TLS.")
    tls_key_file: str = Field("", description="PEM file of its key.")
    tls_client_ca_file: str = Field("", description="PEM file of the authorities whose certificates callers must show (mutual TLS).")
    tls_ca_file: str = Field("", description="PEM file of the authorities that vouch for the other services; wanted with tls_cert_file.")

    @model_validator(mode="after")
    def _tls_is_whole(self) -> SecuritySettings:
        if len({bool(self.tls_cert_file), bool(self.tls_key_file), bool(self.tls_ca_file)}) > 1:
            raise ValueError("tls_cert_file, tls_key_file and tls_ca_file go together")
        if self.tls_client_ca_file and not self.tls_cert_file:
            raise ValueError("tls_client_ca_file needs tls_cert_file")
        return self

    def check_listen(self, setting: str, address: str) -> None:
        """Raises ConfigError for an address that other hosts reach, where nothing protects it."""
        host = address.rpartition(":")[0].strip("[]")
        if address.startswith("unix:") or is_loopback(host):
            return
        if not self.key_file and not self.no_auth:
            raise ConfigError(
                f"{setting}: other hosts reach {host}, and calls need no keys: listen on 127.0.0.1, name a file of keys in "
                "security.key_file (`qlm keys add`), or set security.no_auth=true to serve anyone"
            )
        if self.key_file and not self.tls_cert_file and not self.no_tls:
            raise ConfigError(
                f"{setting}: other hosts reach {host}, and keys would travel in clear: set security.tls_cert_file, "
                "or security.no_tls=true where a proxy or a private network protects them"
            )

    def credentials(self) -> Credentials:
        """Credentials of this process for other services. Raises ConfigError."""
        return Credentials(
            api_key=read_key(self.service_key_file) if self.service_key_file else "",
            ca_file=self.tls_ca_file,
            cert_file=self.tls_cert_file,
            cert_key_file=self.tls_key_file,
        )


class ServiceConfig(Section):
    """The part of the configuration file that every service reads; each adds its own section."""

    queue: QueueSettings = Field(default_factory=QueueSettings, description="The queue that it works on.")
    models: tuple[ModelSettings, ...] = Field((), description="The served models.")
    security: SecuritySettings = Field(default_factory=SecuritySettings, description="Keys and TLS.")
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings, description="Logs and metrics.")

    def catalogue(self) -> dict[str, ModelSpec]:
        """The served models by name."""
        return {model.name: model.spec() for model in self.models}


@lru_cache(maxsize=256)  # each call over HTTP has its host checked
def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class GrpcSettings(Section):
    """Limits of a gRPC server."""

    message_bytes_max: Count = Field(8 << 20, description="Largest message received or sent.")
    concurrent_rpcs_max: Count = Field(20_000, description="Calls in progress, streams included; more are refused with RESOURCE_EXHAUSTED.")
    keepalive_time_s: Seconds = Field(30.0, description="Silence after which a connection is probed.")
    keepalive_timeout_s: Seconds = Field(10.0, description="How long an unanswered probe is waited for.")
    stop_grace_s: Seconds = Field(5.0, description="How long calls in progress may go on at a stop.")
