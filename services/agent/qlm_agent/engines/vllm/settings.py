"""Settings of the vllm engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qlm_process.settings import Count, Seconds, Section


class VllmSettings(Section):
    """vLLM in child processes of the agent."""

    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="Where it computes. cpu: warm models are idle processes; cuda: sleeping ones."
    )
    gpus: str = Field("", description="cuda: GPUs of the host that it may use, as CUDA_VISIBLE_DEVICES names them (0,1); empty: all.")
    python: str = Field("", description="Python interpreter that has vllm and this package; empty: the agent's own.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("float32", description="Of weights and KV.")
    kv_cache_gb: float = Field(1.0, gt=0, allow_inf_nan=False, description="Memory for the KV of one model, in GB; on CUDA of each GPU.")
    block_size: Count = Field(32, description="Tokens of one block of KV.")
    prefill_chunk_tokens: Count = Field(2048, description="Prompt tokens that one step takes in at most.")
    prefix_caching: bool = Field(True, description="Whether prompts with a common beginning share its KV.")
    enforce_eager: bool = Field(True, description="No compilation and no CUDA graphs: starts quicker, runs slower on a GPU.")
    cpu_threads: Count = Field(1, description="Threads of one engine on a CPU.")
    host_memory_gb: float = Field(
        8.0,
        ge=0,
        allow_inf_nan=False,
        description="Host memory for the weights of models that are kept warm, the active one's included, in GB.",
    )
    host_kv_gb: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Host memory for the KV of requests that make room, in GB; 0: none."
    )
    keep_cold: bool = Field(
        True,
        description="cuda: whether a model that leaves the GPU and host memory keeps its process, asleep without weights (level 2).",
    )
    step_timeout_s: Seconds = Field(60.0, description="After so long without an answer a process with work counts as hung and is killed.")
    load_timeout_s: Seconds = Field(600.0, description="Longest load of a model.")
    restarts_max: Count = Field(5, description="How often in a row the active model's process is started again before the agent gives up.")
    arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Further arguments of vllm.EngineArgs by name, over those that follow from the others."
    )
