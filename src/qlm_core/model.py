"""The catalogue: the models that a queue serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A served model. `profile`: the name of its rows in the hardware profiles; several served models (fine-tunes) may share one.
    `context_tokens_max`: prompt and output together."""

    name: str
    profile: str
    context_tokens_max: int = 8192
    vocabulary_size: int = 32_000
