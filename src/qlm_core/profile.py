"""Profiles: what the estimator knows of hardware (GPU and model) and of workload (request class).

A snapshot is one version of all of them. Hardware comes from the shipped table and, once an instance has been measured, from that instance.
Workload comes from finished requests; a class with few of them leans on its model, a model with few on a stated prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from qlm_core.distribution import Normal
from qlm_core.instance import InstanceFacts
from qlm_core.model import ModelSpec

PRIOR_SAMPLES = 20.0
"""How many finished requests weigh as much as the wider class that a class leans on."""

HardwareKey = tuple[str, int, str]
"""(gpu, n_gpu, profile name)."""
WorkloadKey = tuple[str, str, str]
"""(model, SLO class, token class); "" stands for any."""

_TIMES = (
    "decode_a_ms",
    "decode_b_ms_per_seq",
    "decode_c_ms_per_context_token",
    "prefill_base_ms",
    "prefill_ms_per_token",
    "load_disk_to_cpu_s",
    "load_cpu_to_gpu_s",
    "kv_swap_us_per_token",
    "recompute_us_per_token",
)
"""Fields of a hardware profile that are durations, or durations for something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """How fast a model runs on a GPU (see estimator.proto for the fields). `model` is the name of a profile, as in `ModelSpec.profile`.
    `instance`: "" in a shipped row; else the row was learned there. All times of decode and prefill are multiplied by `slowdown`."""

    gpu: str
    n_gpu: int
    model: str
    instance: str = ""
    weights_gb: float
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    decode_a_ms: float
    decode_b_ms_per_seq: float
    decode_c_ms_per_context_token: float
    prefill_base_ms: float
    prefill_ms_per_token: float
    load_disk_to_cpu_s: float
    load_cpu_to_gpu_s: float
    kv_swap_us_per_token: float
    recompute_us_per_token: float
    slowdown: float = 1.0
    samples: int = 0

    def __post_init__(self) -> None:
        for name in ("weights_gb", *_TIMES):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"hardware profile {self.gpu} x{self.n_gpu} {self.model}: {name} is finite and >= 0, got {value}")
        if not (math.isfinite(self.slowdown) and self.slowdown > 0.0 and self.decode_a_ms > 0.0):
            raise ValueError(f"hardware profile {self.gpu} x{self.n_gpu} {self.model}: slowdown and decode_a_ms are > 0")
        if self.n_gpu < 1 or self.kv_capacity_tokens < 1 or self.samples < 0:
            raise ValueError(f"hardware profile {self.gpu} x{self.n_gpu} {self.model}: n_gpu, kv_capacity_tokens >= 1, samples >= 0")

    @property
    def key(self) -> HardwareKey:
        return (self.gpu, self.n_gpu, self.model)

    def decode_step_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of one decode step over so many sequences, which hold `context_tokens` in all: d(B) of QLM section 6."""
        per_sequence = self.decode_b_ms_per_seq * sequences + self.decode_c_ms_per_context_token * context_tokens
        return self.slowdown * (self.decode_a_ms + per_sequence) * 1e-3

    def prefill_s(self, prompt_tokens: float) -> float:
        """Seconds of one prefill by itself: P of QLM section 6, equation 1."""
        return self.slowdown * (self.prefill_base_ms + self.prefill_ms_per_token * prompt_tokens) * 1e-3

    def prefill_work_s(self, prompt_tokens: float) -> float:
        """Seconds that a prefill adds to a full engine: without its base, which the decode step it rides with pays anyway."""
        return self.slowdown * self.prefill_ms_per_token * prompt_tokens * 1e-3

    def swap_s(self, warm: bool) -> float:
        """Seconds to make this model the active one: S of QLM table 2, from host memory (warm) or from disk."""
        return self.load_cpu_to_gpu_s if warm else self.load_disk_to_cpu_s + self.load_cpu_to_gpu_s

    def scaled(self, time_scale: float) -> HardwareProfile:
        """The same engine with a clock that runs `time_scale` > 0 times faster: every duration divided by it."""
        if not (math.isfinite(time_scale) and time_scale > 0.0):
            raise ValueError(f"a time scale is finite and > 0, got {time_scale}")
        if time_scale == 1.0:
            return self
        return replace(self, **{name: getattr(self, name) / time_scale for name in _TIMES})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadProfile:
    """Token counts of a class of requests: the mean and variance of mu_o and sigma_o of QLM equation 3. "" stands for any."""

    model: str = ""
    slo_class: str = ""
    token_class: str = ""
    prompt_tokens_mean: float
    prompt_tokens_variance: float
    output_tokens_mean: float
    output_tokens_variance: float
    samples: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"workload profile {self.key}: {item.name} is finite and >= 0, got {value}")
        if self.output_tokens_mean <= 0.0:
            raise ValueError(f"workload profile {self.key}: output_tokens_mean is > 0")

    @property
    def key(self) -> WorkloadKey:
        return (self.model, self.slo_class, self.token_class)

    @property
    def prompt_tokens(self) -> Normal:
        return Normal(self.prompt_tokens_mean, self.prompt_tokens_variance)

    @property
    def output_tokens(self) -> Normal:
        """O of QLM equation 3."""
        return Normal(self.output_tokens_mean, self.output_tokens_variance)


WORKLOAD_PRIOR = WorkloadProfile(
    prompt_tokens_mean=1154.7, prompt_tokens_variance=1108.8**2, output_tokens_mean=211.1, output_tokens_variance=162.9**2
)
"""What is believed of a model without data: the moments of the Azure conversation trace of 2023 (AzurePublicDataset @ b469a113cedc,
AzureLLMInferenceTrace_conv.csv, CC-BY-4.0; Patel et al., Splitwise, ISCA 2024)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSnapshot:
    """One version of all profiles. `made_s`: seconds of the queue's clock. Lookups cost O(1)."""

    version: int
    made_s: float
    hardware: tuple[HardwareProfile, ...]
    workload: tuple[WorkloadProfile, ...] = ()
    _shipped: Mapping[HardwareKey, HardwareProfile] = field(init=False, repr=False, compare=False)
    _learned: Mapping[tuple[str, str], HardwareProfile] = field(init=False, repr=False, compare=False)
    _blended: Mapping[WorkloadKey, WorkloadProfile] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.version < 0 or not math.isfinite(self.made_s):
            raise ValueError(f"a snapshot has a version >= 0 and a finite time, got {self.version} and {self.made_s}")
        object.__setattr__(self, "_shipped", {row.key: row for row in self.hardware if not row.instance})
        object.__setattr__(self, "_learned", {(row.instance, row.model): row for row in self.hardware if row.instance})
        object.__setattr__(self, "_blended", _blend_all(self.workload))

    def hardware_for(self, instance: InstanceFacts, spec: ModelSpec) -> HardwareProfile | None:
        """The row of this instance if it was learned on the GPUs it has now, else the shipped row of its GPUs, with durations as its clock
        shows them (divided by `time_scale`). None for a pair that nobody has measured."""
        row = self._learned.get((instance.name, spec.profile))
        if row is None or (row.gpu, row.n_gpu) != (instance.gpu, instance.n_gpu):
            row = self._shipped.get((instance.gpu, instance.n_gpu, spec.profile))
        return None if row is None else row.scaled(instance.time_scale)

    def workload_for(self, model: str, slo_class: str, token_class: str) -> WorkloadProfile:
        """The class's own moments leaning on those of its model, and these on `WORKLOAD_PRIOR`, by `PRIOR_SAMPLES`. `samples` are those of
        the narrowest class that has any."""
        for key in ((model, slo_class, token_class), (model, "", token_class), (model, "", "")):
            row = self._blended.get(key)
            if row is not None:
                return row
        return WORKLOAD_PRIOR


def _blend_all(rows: tuple[WorkloadProfile, ...]) -> dict[WorkloadKey, WorkloadProfile]:
    """Every row leaning on the next wider one: any class of the model, the token class within it, the SLO class within that."""
    blended: dict[WorkloadKey, WorkloadProfile] = {}
    for row in sorted(rows, key=lambda row: (row.slo_class != "", row.token_class != "", row.key)):
        wider = blended.get((row.model, "", row.token_class)) if row.slo_class else None
        if wider is None and (row.slo_class or row.token_class):
            wider = blended.get((row.model, "", ""))
        blended[row.key] = _blend(row, wider if wider is not None else WORKLOAD_PRIOR)
    return blended


def _blend(row: WorkloadProfile, wider: WorkloadProfile) -> WorkloadProfile:
    """Mean and variance of the mixture of the row's requests and `PRIOR_SAMPLES` of the wider class."""
    weight = row.samples / (row.samples + PRIOR_SAMPLES)
    prompt = _mixture(row.prompt_tokens, wider.prompt_tokens, weight)
    output = _mixture(row.output_tokens, wider.output_tokens, weight)
    return replace(
        row,
        prompt_tokens_mean=prompt.mean,
        prompt_tokens_variance=prompt.variance,
        output_tokens_mean=output.mean,
        output_tokens_variance=output.variance,
    )


def _mixture(own: Normal, wider: Normal, weight: float) -> Normal:
    mean = weight * own.mean + (1.0 - weight) * wider.mean
    between = weight * (1.0 - weight) * (own.mean - wider.mean) ** 2
    return Normal(mean, weight * own.variance + (1.0 - weight) * wider.variance + between)
