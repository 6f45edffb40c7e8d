"""The configuration of a cluster that runs vLLM on this machine: a pure function of its GPUs, of the models' folders and of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from qlm_cli.serve.document import BATCH_MAX, GPUS_MAX, Document, gateways
from qlm_cli.serve.gpus import CPU
from qlm_core.profiles.hardware_prior import gpu_facts, hardware_prior, why_none
from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.model import ModelFacts

CONTEXT_LEAST = 4_096
"""Tokens of context for which a model gets more GPUs; with fewer it serves what fits."""
SPARE_TOKENS = 64
"""Tokens of KV beside those of a context: vLLM keeps a block for itself, and rounds up to blocks."""
HOST_SHARE, HOST_KV_SHARE = 0.5, 0.1
"""Shares of the host's memory: for weights of warm models, and for KV of evicted requests."""
BATCH_MAX_CPU = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A folder of weights. `context_tokens`: of its config.json."""

    name: str
    folder: str
    context_tokens: int
    vocabulary_size: int
    facts: ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`gpus`: their ids, as CUDA_VISIBLE_DEVICES has them; (): vLLM computes on the CPU. `gpu`: their name in the hardware profiles."""

    gpu: str = CPU
    gpus: tuple[str, ...] = ()
    memory_gb: float = 16.0

    @property
    def places(self) -> int:
        """GPUs, or the one CPU."""
        return max(1, len(self.gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """`pins`: model -> instances that serve it alone; the other models share the rest. `batch_max`: 0: by the device."""

    http: str = "127.0.0.1:8080"
    grpc: str = "127.0.0.1:50051"
    files: str = ""
    batch_max: int = 0
    pins: Mapping[str, int] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


def local_document(models: Sequence[LocalModel], host: Host, options: LocalOptions) -> Document:
    """The configuration file. A model runs on the least power of two of GPUs that holds it. Raises ConfigError for models that do not fit,
    GPUs that are not known, and options that name no model."""
    if host.gpu not in gpu_facts():
        raise ConfigError(f"--gpu {host.gpu}: may be {', '.join(gpu_facts())}")
    by_name = {model.name: model for model in models}
    if len(by_name) != len(models):
        raise ConfigError("--model: two folders of one name")
    unknown = sorted({*options.pins, *options.aliases.values()} - by_name.keys())
    if unknown:
        raise ConfigError(f"--pin, --alias: no --model is named {', '.join(unknown)}; there are {', '.join(by_name)}")
    rows = {model.name: _row(host, model) for model in models}
    shared = [model.name for model in models if model.name not in options.pins]
    groups = [([name], count) for name, count in options.pins.items()]
    free = host.places - sum(count * rows[name].n_gpu for name, count in options.pins.items())
    if shared:
        each = max(rows[name].n_gpu for name in shared)
        groups.append((shared, free // each))
        if free < each:
            raise ConfigError(f"{', '.join(shared)} need {each} GPUs, and {max(0, free)} of {host.places} are left")
    elif free < 0:
        raise ConfigError(f"--pin: {-free} GPUs more than the {host.places} of this machine")
    count = sum(number for _, number in groups)
    agents: list[dict[str, Any]] = []
    at = 0
    for names, number in groups:
        for _ in range(number):
            n_gpu = max(rows[name].n_gpu for name in names)
            agents.append(_agent(f"vllm-{len(agents)}", names, n_gpu, at, host, options, {name: rows[name] for name in names}, count))
            at += n_gpu
    # A model's context fits in the KV of every instance that serves it.
    kv_bytes = {
        name: min(agent["vllm"]["kv_cache_gb"] * agent["n_gpu"] * 1e9 for agent in agents if name in agent["models"]) for name in by_name
    }
    return {
        "models": [_model_section(model, kv_bytes[model.name], options) for model in models],
        "gateways": gateways(options.grpc, options.http, options.files),
        "agents": agents,
    }


def _row(host: Host, model: LocalModel) -> HardwareProfile:
    n_gpu, largest = 1, min(GPUS_MAX, host.places)
    while True:
        row = hardware_prior(host.gpu, n_gpu, model.name, model.facts)
        if row is not None and (row.kv_capacity_tokens >= min(CONTEXT_LEAST, model.context_tokens) or 2 * n_gpu > largest):
            return row
        if 2 * n_gpu > largest:
            raise ConfigError(f"--model {model.folder}: {why_none(host.gpu, n_gpu, model.name, model.facts)}")
        n_gpu *= 2


def _model_section(model: LocalModel, kv_bytes: float, options: LocalOptions) -> dict[str, Any]:
    kv_tokens = int(kv_bytes / model.facts.kv_bytes_per_token) - SPARE_TOKENS
    if kv_tokens < 1:
        raise ConfigError(f"--model {model.folder}: no room for its KV beside the weights of the models that share its GPUs; --pin it")
    return {
        "name": model.name,
        "profile": model.name,
        "weights": model.folder,
        "tokenizer": f"{model.folder}/tokenizer.json",
        "context_tokens_max": min(model.context_tokens, kv_tokens),
        "vocabulary_size": model.vocabulary_size,
        "facts": asdict(model.facts),
        "aliases": [alias for alias, name in options.aliases.items() if name == model.name],
    }


def _agent(
    name: str,
    models: Sequence[str],
    n_gpu: int,
    first_gpu: int,
    host: Host,
    options: LocalOptions,
    rows: Mapping[str, HardwareProfile],
    agents: int,
) -> dict[str, Any]:
    """`agents`: how many share the host's memory."""
    on_gpu = bool(host.gpus)
    kv_gb = min(row.kv_capacity_tokens * row.kv_bytes_per_token for row in rows.values()) / n_gpu / 1e9
    return {
        "name": name,
        "gpu": host.gpu,
        "n_gpu": n_gpu,
        "engine": "vllm",
        "models": list(models),
        "batch_max": options.batch_max or (BATCH_MAX if on_gpu else BATCH_MAX_CPU),
        "vllm": {
            "device": "cuda" if on_gpu else "cpu",
            "gpus": ",".join(host.gpus[first_gpu : first_gpu + n_gpu]),
            "dtype": "auto",
            "enforce_eager": not on_gpu,
            "kv_cache_gb": round(kv_gb if on_gpu else min(kv_gb, HOST_KV_SHARE * host.memory_gb / agents), 3),
            "host_memory_gb": round(HOST_SHARE * host.memory_gb / agents, 3),
            "host_kv_gb": round(HOST_KV_SHARE * host.memory_gb / agents, 3) if on_gpu else 0.0,
        },
    }
