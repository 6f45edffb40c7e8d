"""The configuration of a cluster in front of servers: a pure function of what was found and of the command's options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log
from typing import Any
from urllib.parse import urlsplit

from qlm_cli.serve.discovery import FoundModel, FoundServer
from qlm_core.profiles.hardware_prior import gpu_facts, hardware_prior, model_facts
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.model import ModelFacts

CONTEXT_TOKENS = 8_192
"""Context of a model whose server reports none."""
PARAMETERS_BILLION = 7.0
"""Size of a model whose name has none: the estimator learns how fast its servers are."""
SIZE_MAX = 10_000.0
GPUS_MAX = 64
NAME_BYTES_MAX = 64
SIZE = re.compile(r"(?:(?<![\d.])(\d+)x)?(?<![\d.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
DEFAULT_GPU = "A100-80GB"
BATCH_MAX = 256
KEY_VARIABLE = "QLM_ENGINE_API_KEY"
"""Environment variable that hands the servers' API key to the agents."""

Document = Mapping[str, list[dict[str, Any]]]
"""Section of the configuration file -> its entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """`gpu`, `n_gpu`: of every server; 0: the least that holds its largest model. `batch_max`: requests that a server runs at once.
    `files`: the folder of files and batches. `tokenizers`: model -> path of its tokenizer.json. `aliases`: another name -> model."""

    http: str = "127.0.0.1:8080"
    grpc: str = "127.0.0.1:50051"
    files: str = ""
    gpu: str = DEFAULT_GPU
    n_gpu: int = 0
    batch_max: int = BATCH_MAX
    has_api_key: bool = False
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


def document(servers: Sequence[FoundServer], options: ServeOptions) -> Document:
    """The configuration file. Raises ConfigError for options that do not fit the models found, and for GPUs that are not known."""
    if options.gpu not in gpu_facts():
        raise ConfigError(f"--gpu {options.gpu}: may be {', '.join(gpu_facts())}")
    models = _models(servers, options)
    unknown = sorted({*options.tokenizers, *options.aliases.values()} - models.keys())
    if unknown:
        raise ConfigError(f"no server serves {', '.join(unknown)}; found: {', '.join(models)}")
    return {
        "models": [_model_section(model, options) for model in models.values()],
        "gateways": gateways(options.grpc, options.http, options.files),
        "agents": [_agent(name, server, models, options) for name, server in zip(_names(servers), servers, strict=True)],
    }


def gateways(grpc: str, http: str, files: str) -> list[dict[str, Any]]:
    """One gateway. `files`: the folder of files and batches."""
    return [{"name": "gateway-0", "listen": grpc, "http": {"listen": http}, "batches": {"folder": files}}]


def size_billion(name: str) -> float:
    """Parameters of a model in 10^9, as its name has them ("Llama-3.1-8B", "SmolLM2-135M", "Mixtral-8x7B"); else PARAMETERS_BILLION."""
    sizes = [float(experts or 1) * float(number) * (1.0 if unit in "bB" else 1e-3) for experts, number, unit in SIZE.findall(name)]
    return min(max(sizes, default=PARAMETERS_BILLION), SIZE_MAX) or PARAMETERS_BILLION


def facts_of(name: str) -> ModelFacts:
    """A believable shape: that of the known model nearest in size, with the size in its name."""
    size = size_billion(name)
    nearest = min(model_facts().values(), key=lambda facts: abs(log(facts.parameters_billion / size)))
    return replace(nearest, parameters_billion=size, active_billion=min(nearest.active_billion, size))


def _models(servers: Sequence[FoundServer], options: ServeOptions) -> dict[str, FoundModel]:
    """Each model once: with the least context of its servers, and a tokenizer where one is known."""
    models: dict[str, FoundModel] = {}
    for model in (model for server in servers for model in server.models):
        before = models.get(model.name, model)
        contexts = [each for each in (before.context_tokens, model.context_tokens) if each]
        tokenizer = options.tokenizers.get(model.name) or before.tokenizer or model.tokenizer
        models[model.name] = replace(model, context_tokens=min(contexts, default=0), tokenizer=tokenizer)
    return models


def _model_section(model: FoundModel, options: ServeOptions) -> dict[str, Any]:
    return {
        "name": model.name,
        "profile": model.name,
        "context_tokens_max": model.context_tokens or CONTEXT_TOKENS,
        "facts": asdict(facts_of(model.name)),
        "tokenizer": model.tokenizer,
        "aliases": [alias for alias, name in options.aliases.items() if name == model.name],
    }


def _agent(name: str, server: FoundServer, models: Mapping[str, FoundModel], options: ServeOptions) -> dict[str, Any]:
    served = [model.name for model in server.models]
    has_tokens = server.is_vllm and all(models[each].tokenizer for each in served)
    return {
        "name": name,
        "gpu": options.gpu,
        "n_gpu": options.n_gpu or max(_gpus(options.gpu, models[each]) for each in served),
        "engine": "openai",
        "models": served,
        "batch_max": options.batch_max,
        "openai": {
            "base_url": server.url,
            "api_key_env": KEY_VARIABLE if options.has_api_key else "",
            "output": "tokens" if has_tokens else "text",
            "continues_chats": server.is_vllm,
        },
    }


def _gpus(gpu: str, model: FoundModel) -> int:
    """The least power of two of GPUs that holds a model and one request of its whole context, by its facts."""
    n_gpu, facts = 1, facts_of(model.name)
    while n_gpu < GPUS_MAX:
        row = hardware_prior(gpu, n_gpu, model.name, facts)
        if row is not None and row.kv_capacity_tokens >= (model.context_tokens or CONTEXT_TOKENS):
            break
        n_gpu *= 2
    return n_gpu


def _names(servers: Sequence[FoundServer]) -> list[str]:
    """A name of an instance for each server, by its address: the same at every start."""
    names: list[str] = []
    for server in servers:
        parts = urlsplit(server.url)
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{parts.netloc}{parts.path}").strip("-")[:NAME_BYTES_MAX]
        if name in names:
            raise ConfigError(f"{server.url} is given twice, or differs from another server only in what an instance's name leaves out")
        names.append(name)
    return names
