"""Plans the load of an engine process from the settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qlm_agent.engines.port import ModelLoadFailed
from qlm_agent.engines.vllm.folder import ModelFolder
from qlm_agent.engines.vllm.runner.port import LoadPlan
from qlm_agent.engines.vllm.runner.runs import kv_limit_tokens
from qlm_agent.engines.vllm.settings import VllmSettings

LEAST_UTILIZATION = 0.01
"""vLLM refuses to start if less than this share of a GPU is free, whatever the KV settings; sleeping models keep a part of each GPU (their
contexts and graphs), so its own 0.92 would be too much after some of them. With KV in bytes it has no other effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmModel:
    """A served model. `weights`: its folder; `chat_template`: a path, "" for its own; `policy`: name of the engine policy, "" for the
    plug-in's default, made with `policy_options`."""

    name: str
    weights: str
    context_tokens_max: int
    chat_template: str = ""
    policy: str = ""
    policy_options: Mapping[str, bool | int | float | str] = field(default_factory=dict)


def load_plan(model: VllmModel, folder: ModelFolder, settings: VllmSettings, *, batch_max: int, n_gpu: int) -> LoadPlan:
    """Raises ModelLoadFailed for KV that holds no request."""
    kv_bytes = math.floor(settings.kv_cache_gb * 1e9)
    per_token = folder.kv_bytes_per_token(settings.dtype)
    gpus = n_gpu if settings.device == "cuda" else 1
    longest = kv_limit_tokens(model.context_tokens_max, kv_bytes, folder.kv_bytes_per_token(settings.dtype, gpus), settings.block_size)
    if longest < 1:
        raise ModelLoadFailed(
            f"model {model.name}: agent.vllm.kv_cache_gb: {settings.kv_cache_gb:g} GB hold less than two blocks of "
            f"{settings.block_size} tokens, {folder.kv_bytes_per_token(settings.dtype, gpus)} bytes each"
        )
    engine: dict[str, Any] = {
        "dtype": settings.dtype,
        "max_model_len": longest,
        "kv_cache_memory_bytes": kv_bytes,
        "block_size": settings.block_size,
        "max_num_seqs": batch_max,
        "max_num_batched_tokens": max(settings.prefill_chunk_tokens, batch_max),
        "enable_prefix_caching": settings.prefix_caching,
        "enforce_eager": settings.enforce_eager,
        "seed": 0,
    }
    if settings.device == "cuda":
        engine |= {
            "tensor_parallel_size": n_gpu,
            "enable_sleep_mode": True,
            "gpu_memory_utilization": LEAST_UTILIZATION,
        }
    return LoadPlan(
        weights=str(folder.path),
        engine={**engine, **settings.arguments},
        context_tokens=model.context_tokens_max,
        kv_bytes_per_token=per_token,
        chat_template=model.chat_template,
        host_kv_bytes=math.floor(settings.host_kv_gb * 1e9),
        policy=model.policy,
        policy_options=dict(model.policy_options),
        device_bytes=folder.weights_bytes // gpus + kv_bytes,
    )


def environment(settings: VllmSettings) -> Mapping[str, str]:
    """Environment of the processes. A process alone on its cores would bind a thread to each."""
    found = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    if settings.gpus:
        found["CUDA_VISIBLE_DEVICES"] = settings.gpus
    if settings.device == "cpu":
        threads = str(settings.cpu_threads)
        found |= {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return found
