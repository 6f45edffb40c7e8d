"""A hardware profile: how fast one model runs on one kind of GPU (QLM section 6: Theta, P, d, and the swap times of its table 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", float, NDArray[np.float64])

HardwareKey = tuple[str, int, str]
"""(gpu, n_gpu, profile name)."""

ORIGIN_SHIPPED = ""
ORIGIN_FACTS = "facts"
ORIGIN_MEASURED = "measured"
ORIGINS = (ORIGIN_SHIPPED, ORIGIN_FACTS, ORIGIN_MEASURED)
"""Where the figures of a row come from: the table that QLM ships, arithmetic on facts of GPU and model, or a run of `qlm profile`."""

_SLOWED = (
    "decode_a_ms",
    "decode_b_ms_per_seq",
    "decode_c_ms_per_context_token",
    "prefill_base_ms",
    "prefill_ms_per_token",
    "prefill_ms_per_token_squared",
)
"""Fields that `slowdown` multiplies."""

TIMES = (
    *_SLOWED,
    "load_disk_to_cpu_s",
    "load_cpu_to_gpu_s",
    "kv_swap_base_ms",
    "kv_swap_us_per_token",
    "recompute_us_per_token",
)
"""Fields of a hardware profile that are durations, or durations for something."""


TIMED_OPERATIONS = ("swap_warm", "swap_cold", "kv_swap")
"""Fields that say how much longer an operation takes."""

FIGURE_MAX = 1e12
"""More is no time of an engine, nor a size, and would overflow in predictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSlowdown:
    """How much longer one kind of operation (a load, a move of KV) takes on an instance than its hardware profile says. `slowdown`:
    measured over profiled durations, > 0. `samples`: operations behind it; `prior_share`: how much of it is still the profile's, 1 for
    all."""

    slowdown: float = 1.0
    samples: int = 0
    prior_share: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slowdown) and self.slowdown > 0.0):
            raise ValueError(f"the slowdown of an operation is finite and > 0, got {self.slowdown}")
        if self.samples < 0:
            raise ValueError(f"an operation has samples >= 0, got {self.samples}")
        if not 0.0 <= self.prior_share <= 1.0:
            raise ValueError(f"the prior's share of an operation is from 0 to 1, got {self.prior_share}")


AS_PROFILED = OperationSlowdown()


def prefill_shares(uncached_share: Number) -> tuple[Number, Number]:
    """Shares of a whole prompt's linear and quadratic prefill work where only the last `uncached_share` of its tokens are computed: their
    attention reads the cached ones, p^2 - ((1 - u) p)^2 of p^2."""
    return uncached_share, uncached_share * (2.0 - uncached_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """How fast a model runs on a GPU (see estimator.proto for the fields). `model` is the name of a profile, as in `ModelSpec.profile`.
    `instance`: "" in a row of the pair; else the row was learned there. All times of decode and prefill are multiplied by `slowdown`.
    `samples`: runs behind `slowdown`; `prior_share`: how much of it is still the pair's own row, 1 for all. `swap_warm`,
    `swap_cold`, `kv_swap`: how much longer loads from host memory, loads from disk and moves of KV take there."""

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
    prefill_ms_per_token_squared: float = 0.0
    load_disk_to_cpu_s: float
    load_cpu_to_gpu_s: float
    kv_swap_us_per_token: float
    recompute_us_per_token: float
    kv_swap_base_ms: float = 0.0
    slowdown: float = 1.0
    samples: int = 0
    prior_share: float = 0.0
    origin: str = ORIGIN_SHIPPED
    swap_warm: OperationSlowdown = AS_PROFILED
    swap_cold: OperationSlowdown = AS_PROFILED
    kv_swap: OperationSlowdown = AS_PROFILED

    def __post_init__(self) -> None:
        name_of_row = f"hardware profile {self.gpu} x{self.n_gpu} {self.model}"
        for name in ("weights_gb", *TIMES):
            value = getattr(self, name)
            if not 0.0 <= value <= FIGURE_MAX:  # False for NaN
                raise ValueError(f"{name_of_row}: {name} is finite and >= 0, got {value}")
        if not (math.isfinite(self.slowdown) and self.slowdown > 0.0 and self.decode_a_ms > 0.0):
            raise ValueError(f"{name_of_row}: slowdown and decode_a_ms are > 0")
        if self.n_gpu < 1 or self.kv_capacity_tokens < 1 or self.samples < 0:
            raise ValueError(f"{name_of_row}: n_gpu, kv_capacity_tokens >= 1, samples >= 0")
        if not 0.0 <= self.prior_share <= 1.0:
            raise ValueError(f"{name_of_row}: prior_share is from 0 to 1, got {self.prior_share}")
        if self.origin not in ORIGINS:
            raise ValueError(f"{name_of_row}: origin is one of {', '.join(repr(each) for each in ORIGINS)}, got {self.origin!r}")

    @property
    def key(self) -> HardwareKey:
        return (self.gpu, self.n_gpu, self.model)

    def decode_step_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of one decode step over so many sequences, which hold `context_tokens` in all: d(B) of QLM section 6."""
        per_sequence = self.decode_b_ms_per_seq * sequences + self.decode_c_ms_per_context_token * context_tokens
        return self.slowdown * (self.decode_a_ms + per_sequence) * 1e-3

    def prefill_s(self, prompt_tokens: float, uncached_share: float = 1.0) -> float:
        """Seconds of one prefill by itself: P of QLM section 6, equation 1, with attention's quadratic part."""
        work_s = self.prefill_work_s(prompt_tokens, prompt_tokens * prompt_tokens, uncached_share)
        return self.slowdown * self.prefill_base_ms * 1e-3 + work_s

    def prefill_work_s(self, prompt_tokens: float, prompt_tokens_squared: float = 0.0, uncached_share: float = 1.0) -> float:
        """Seconds that prefills add to a full engine: without their base, which the decode step they ride with pays anyway.
        `prompt_tokens`: of all of them; `prompt_tokens_squared`: the sum of the square of each, 0 to leave attention's part out;
        `uncached_share`: of each prompt, in (0, 1], what the prefix cache leaves to compute."""
        linear, squared = prefill_shares(uncached_share)
        each_ms = self.prefill_ms_per_token * prompt_tokens * linear + self.prefill_ms_per_token_squared * prompt_tokens_squared * squared
        return self.slowdown * each_ms * 1e-3

    def kv_swap_s(self, tokens: float, requests: float = 1.0) -> float:
        """Seconds to move the KV of so many requests together between GPU and host memory, one way; `tokens`: of all of them."""
        return self.kv_swap.slowdown * (1e3 * self.kv_swap_base_ms * requests + self.kv_swap_us_per_token * tokens) / 1e6

    @property
    def recompute_base_ms(self) -> float:
        """Cost of a prefill beside its tokens: its base, less the decode step that is made in any case and takes it along."""
        return max(0.0, self.prefill_base_ms - self.decode_a_ms - self.decode_b_ms_per_seq)

    def recompute_s(self, tokens: float) -> float:
        """Seconds to compute the KV of an evicted request of so many tokens again."""
        return self.slowdown * (1e3 * self.recompute_base_ms + self.recompute_us_per_token * tokens) / 1e6

    def swap_s(self, warm: bool) -> float:
        """Seconds to make this model the active one: S of QLM table 2, from host memory (warm) or from disk."""
        if warm:
            return self.swap_warm.slowdown * self.load_cpu_to_gpu_s
        return self.swap_cold.slowdown * (self.load_disk_to_cpu_s + self.load_cpu_to_gpu_s)

    def as_pair(self) -> HardwareProfile:
        """Returns, for a row learned on an instance, the row of the pair that its runs were compared with."""
        as_profiled: dict[str, Any] = dict.fromkeys(TIMED_OPERATIONS, AS_PROFILED)
        return replace(self, instance="", slowdown=1.0, samples=0, prior_share=0.0, **as_profiled)

    def as_measured(self) -> HardwareProfile:
        """Returns, for a row learned on an instance, the evidence of its runs alone, as a row of the pair. The prior's share of `slowdown`
        is taken out, and the rest is in the figures of decode and prefill; loads and KV swap are as profiled. Raises ValueError where runs
        say nothing."""
        if not self.instance or self.prior_share >= 1.0:
            raise ValueError("a row that was learned from runs of an instance is needed")
        of_runs = (self.slowdown - self.prior_share) / (1.0 - self.prior_share)
        if of_runs <= 0.0:
            raise ValueError(f"a slowdown of {self.slowdown:g} contradicts a prior's share of {self.prior_share:g}")
        return replace(self.as_pair(), origin=ORIGIN_MEASURED, **{name: of_runs * getattr(self, name) for name in _SLOWED})

    def scaled(self, time_scale: float) -> HardwareProfile:
        """The same engine with a clock that runs `time_scale` > 0 times faster: every duration divided by it, up to FIGURE_MAX."""
        if not (math.isfinite(time_scale) and time_scale > 0.0):
            raise ValueError(f"a time scale is finite and > 0, got {time_scale}")
        if time_scale == 1.0:
            return self
        return replace(self, **{name: min(getattr(self, name) / time_scale, FIGURE_MAX) for name in TIMES})
