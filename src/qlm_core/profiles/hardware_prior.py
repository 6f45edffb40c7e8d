"""A hardware profile for a pair of GPU and model that nobody has measured: arithmetic on their published facts.

The roofline model (Williams, Waterman, Patterson, CACM 2009): a decode step reads all weights and the KV of its context once, so it is
bound by memory bandwidth; a prefill multiplies every prompt token with all weights, so it is bound by arithmetic. Both reach a share of
what the data sheet says, `Efficiency`, fitted to the shipped rows (which are the constants' only ground: see data/hardware_profiles.yaml).

How far off (tests/unit/test_hardware_prior.py fits the constants again without the rows that it judges): a decode step of 32 sequences with
16,000 tokens by 5% on average and 15% at worst for one pair left out, 7% and 15% for a whole kind of GPU left out, 8% and 23% for a model
left out; a prefill of 1,000 tokens by 7%, 10% and 7% on average and 17% at worst. Single figures are worse, since they stand in for each
other: `decode_b` by 28% on average and 62% at worst, `prefill_base` by 45% and a factor of 3.5 (an A10, whose row is itself derived).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import TypeVar

import yaml

from qlm_core.profiles.hardware_profile import ORIGIN_FACTS, HardwareProfile
from qlm_core.vocabulary.model import ModelFacts

Facts = TypeVar("Facts")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Figures of a GPU's data sheet (see data/gpu_facts.yaml). Raises ValueError for figures that are not finite and above zero."""

    memory_gb: float
    bandwidth_gb_s: float
    tflops: float
    host_gb_s: float

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"GPU facts: {item.name} is finite and > 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Efficiency of engines on a GPU. Shares of the data sheet's bandwidth: reading weights (`weights_share`) and KV (`kv_share`) in a
    decode step, weights in a prefill that computes nothing else (`base_share`), host link with one GPU (`host_share`; n GPUs get sqrt(n)
    times as much in all). Shares of its arithmetic: one more sequence in a step (`sequence_share`, above 1: it mostly rides along), a
    prefill's linear part and its attention. `layer_ms`, `reduce_ms`: launch of a layer's kernels, and of its all-reduce where GPUs share
    it."""

    weights_share: float = 0.704
    layer_ms: float = 0.0508
    reduce_ms: float = 0.0087
    sequence_share: float = 1.094
    sequence_ms: float = 0.0381
    kv_share: float = 0.611
    base_share: float = 0.879
    prefill_share: float = 0.568
    attention_share: float = 0.454
    host_share: float = 0.669


EFFICIENCY = Efficiency()

MEMORY_SHARE = 0.9
"""Share of the GPU's memory that the engine takes: vLLM's default of `gpu_memory_utilization`."""

WORKSPACE_GB = 1.0
WORKSPACE_SHARE = 0.017
"""Memory beside weights and KV on each GPU: a constant and this share of its memory (activations of a full prefill chunk)."""

DISK_GB_S = 3.2
"""Weights from a local disk (data/hardware_profiles.yaml: serverlessllm, vllm_sleep_mode)."""

TRANSFER_S = 0.15
"""Time of waking a model up beside the copy."""


def hardware_prior(
    gpu: str, n_gpu: int, model: str, facts: ModelFacts | None = None, efficiency: Efficiency = EFFICIENCY
) -> HardwareProfile | None:
    """Returns the prior of a pair without any measurement, with `origin` "facts". `facts`: of the model; None: those known of that name.
    None for a GPU or a model without facts, and where the model does not fit into these GPUs."""
    card = gpu_facts().get(gpu)
    facts = facts if facts is not None else model_facts().get(model)
    if card is None or facts is None or n_gpu < 1:
        return None
    free_gb = n_gpu * usable_gb(card.memory_gb) - facts.weights_gb
    kv_capacity_tokens = math.floor(free_gb * 1e9 / facts.kv_bytes_per_token)
    if kv_capacity_tokens < 1:
        return None
    step_ms, sequence_ms, context_token_ms = decode_terms(card, n_gpu, facts, efficiency)
    base_ms, prefill_ms, pair_ms = prefill_terms(card, n_gpu, facts, efficiency)
    host_gb_s = efficiency.host_share * card.host_gb_s * math.sqrt(n_gpu)
    return HardwareProfile(
        gpu=gpu,
        n_gpu=n_gpu,
        model=model,
        weights_gb=facts.weights_gb,
        kv_bytes_per_token=facts.kv_bytes_per_token,
        kv_capacity_tokens=kv_capacity_tokens,
        decode_a_ms=step_ms,
        decode_b_ms_per_seq=sequence_ms,
        decode_c_ms_per_context_token=context_token_ms,
        prefill_base_ms=base_ms,
        prefill_ms_per_token=prefill_ms,
        prefill_ms_per_token_squared=pair_ms,
        load_disk_to_cpu_s=facts.weights_gb / DISK_GB_S,
        load_cpu_to_gpu_s=TRANSFER_S + facts.weights_gb / host_gb_s,
        kv_swap_us_per_token=facts.kv_bytes_per_token / host_gb_s * 1e-3,
        recompute_us_per_token=prefill_ms * 1e3,
        origin=ORIGIN_FACTS,
    )


def usable_gb(memory_gb: float) -> float:
    """Memory of one GPU for weights and KV."""
    return (MEMORY_SHARE - WORKSPACE_SHARE) * memory_gb - WORKSPACE_GB


def decode_terms(card: GpuFacts, n_gpu: int, facts: ModelFacts, efficiency: Efficiency = EFFICIENCY) -> tuple[float, float, float]:
    """Milliseconds of a decode step: of the step, for each sequence, for each token of context. Memory is not checked."""
    bandwidth_gb_s = n_gpu * card.bandwidth_gb_s
    token_ms = 2.0 * (facts.active_billion or facts.parameters_billion) / (n_gpu * card.tflops)
    layer_ms = efficiency.layer_ms + (efficiency.reduce_ms if n_gpu > 1 else 0.0)
    return (
        facts.weights_gb / bandwidth_gb_s * 1e3 / efficiency.weights_share + facts.layers * layer_ms,
        token_ms / efficiency.sequence_share + efficiency.sequence_ms,
        facts.kv_bytes_per_token / (bandwidth_gb_s * efficiency.kv_share) * 1e-6,
    )


def prefill_terms(card: GpuFacts, n_gpu: int, facts: ModelFacts, efficiency: Efficiency = EFFICIENCY) -> tuple[float, float, float]:
    """Milliseconds of a prefill: its base, for each token, for each squared token. Memory is not checked."""
    tflops = n_gpu * card.tflops
    return (
        facts.weights_gb / (n_gpu * card.bandwidth_gb_s) * 1e3 / efficiency.base_share,
        2.0 * (facts.active_billion or facts.parameters_billion) / tflops / efficiency.prefill_share,
        2.0 * facts.layers * facts.hidden_size / (tflops * 1e9) / efficiency.attention_share,
    )


def why_none(gpu: str, n_gpu: int, model: str, facts: ModelFacts | None = None) -> str:
    """Why `hardware_prior` gives none, for people."""
    if gpu not in gpu_facts():
        return f"the GPU {gpu!r} is not known, but {', '.join(gpu_facts())}"
    facts = facts if facts is not None else model_facts().get(model)
    if facts is None:
        return f"nothing is known of {model!r}: give models.facts; known are {', '.join(model_facts())}"
    return f"its weights of {facts.weights_gb:.1f} GB leave no room for KV on {n_gpu} x {gpu}"


@cache
def gpu_facts() -> Mapping[str, GpuFacts]:
    """By name. Raises ValueError where the file is damaged."""
    return _read("gpu_facts.yaml", GpuFacts)


@cache
def model_facts() -> Mapping[str, ModelFacts]:
    """By name of a profile. Raises ValueError where the file is damaged."""
    return _read("model_facts.yaml", ModelFacts)


def _read(file: str, kind: Callable[..., Facts]) -> Mapping[str, Facts]:
    document = yaml.safe_load(files("qlm_core").joinpath("data", file).read_text(encoding="utf-8"))
    found: dict[str, Facts] = {}
    for name, entry in document.items():
        try:
            found[str(name)] = kind(**entry)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}: {name}: {error}") from error
    return found
