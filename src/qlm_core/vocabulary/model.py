"""The catalogue: the models that a queue serves."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

BYTES_PER_VALUE = 2
"""Weights and KV of 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Published shape of a model (see data/model_facts.yaml). `active_billion`: parameters that one token passes through, 0 for
    all. Raises ValueError for figures that are not finite and above zero."""

    parameters_billion: float
    layers: int
    hidden_size: int
    kv_heads: int
    head_size: int
    active_billion: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not (math.isfinite(value) and (value > 0.0 or (value == 0.0 and item.name == "active_billion"))):
                raise ValueError(f"model facts: {item.name} is finite and > 0, got {value}")
        if self.active_billion > self.parameters_billion:
            raise ValueError(f"model facts: active_billion is at most parameters_billion, got {self.active_billion}")

    @property
    def weights_gb(self) -> float:
        """10^9 bytes."""
        return self.parameters_billion * BYTES_PER_VALUE

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * BYTES_PER_VALUE * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A served model. `profile`: the name of its rows in the hardware profiles; several served models (fine-tunes) may share one.
    `context_tokens_max`: prompt and output together. `facts`: those of data/model_facts.yaml by `profile` where it is None."""

    name: str
    profile: str
    context_tokens_max: int = 8192
    vocabulary_size: int = 32_000
    facts: ModelFacts | None = None
