"""Measurements of an engine. Durations are of its profile's clock (a simulated engine's time scale is taken out), in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWindow:
    """`steps` decode steps over `sequences` with `context_tokens` in all, on average. Steps are fractional if the engine did not report the
    end of each."""

    steps: float
    sequences: int
    context_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One prefill alone, of a prompt, or of a prompt and `produced` tokens of an earlier attempt."""

    tokens: int
    seconds: float
    resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """KV of `tokens` moved between GPU and host memory."""

    tokens: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Measurements:
    """All measurements of one model on one engine. `loads_cold_s`, `loads_warm_s`: from disk to host memory, from there to the GPU.
    `weights_gb`, `kv_bytes_per_token`: 0 if not reported. `notes`: unmeasured figures, and why."""

    model: str
    kv_capacity_tokens: int = 0
    weights_gb: float = 0.0
    kv_bytes_per_token: float = 0.0
    prefill_chunk_tokens: int = 0
    loads_cold_s: list[float] = field(default_factory=list)
    loads_warm_s: list[float] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    windows: list[DecodeWindow] = field(default_factory=list)
    offloads: list[KvTransfer] = field(default_factory=list)
    engine_s: float = 0.0
    notes: list[str] = field(default_factory=list)
