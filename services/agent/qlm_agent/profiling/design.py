"""The runs that measure an engine's speed (QLM section 6: "running the model with a single batch of requests on the specific GPU").

A few batches suffice, if they differ in the terms of a step's duration: single prefills of lengths in powers of two (base, linear and
quadratic part), and decode batches of few and many sequences with short prompts (a and b) and some with long ones (c). About 140,000 prompt
tokens and 480 decode steps. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PREFILL_TOKENS = (16, 128, 512, 1024, 2048, 4096, 8192)
PREFILL_REPEATS = 3
SHORT_PROMPT_TOKENS = 32
SHORT_SEQUENCES = (1, 4, 16, 64, 256)
LONG_PROMPTS = ((4, 3000), (16, 1500), (16, 3000))
"""Sequences, and prompt tokens of each."""
DECODE_STEPS = 48
"""Steps that all sequences of a decode batch make together."""

PREFILL_BUDGET_TOKENS = 50_000
"""Most prompt tokens of one batch."""
KV_SHARE = 0.8
"""Share of the engine's KV that a batch may take, so that nothing is preempted."""
CHUNK_TOKENS_LEAST = 1024
"""Least prefill tokens of a step while others decode: a run that starts early makes that many tokens more."""

OFFLOAD_SEQUENCES = (1, 4, 8, 12)
OFFLOAD_PROMPT_TOKENS = 2000
OFFLOAD_SMALL_TOKENS = (64, 256, 1024)
"""Prompts of requests that are moved alone: they show the cost of a transfer beside its tokens."""
OFFLOAD_CYCLES = 3
"""Moves of each of them to host memory and back."""
OFFLOAD_STEPS = 2_000
"""Most tokens that a run makes while it waits to be offloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much an experiment runs. `prefills`: prompt tokens, each `repeats` times; `shorts`: sequences of batches with short prompts;
    `longs`: as LONG_PROMPTS."""

    prefills: tuple[int, ...] = PREFILL_TOKENS
    repeats: int = PREFILL_REPEATS
    shorts: tuple[int, ...] = SHORT_SEQUENCES
    longs: tuple[tuple[int, int], ...] = LONG_PROMPTS


WHOLE = Extent()
FIRST = Extent(prefills=(16, 128, 512, 1024), repeats=1, shorts=(1, 4, 16), longs=((4, 500),))
"""The least that separates all figures: 31 runs and 5,400 prompt tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of an engine, in tokens and sequences."""

    context_tokens_max: int
    kv_capacity_tokens: int
    batch_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Runs that begin together and decode together for `steps` steps: each makes `output_tokens`."""

    sequences: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The experiment. `prefills`: prompt tokens of runs by themselves, in order; `offloads`: sequences, and prompt tokens of each,
    of the batches that are moved to host memory."""

    prefills: tuple[int, ...]
    batches: tuple[Batch, ...]
    offloads: tuple[tuple[int, int], ...]


def design(limits: EngineLimits, extent: Extent = WHOLE) -> Design:
    """The design that fits this engine. Raises ValueError for one too small to be measured."""
    if limits.batch_max < 4 or limits.context_tokens_max < 256 or limits.kv_capacity_tokens < 2048:
        raise ValueError(f"an engine is profiled with at least 4 sequences, 256 tokens of context and 2,048 of KV, got {limits}")
    longest = min(limits.context_tokens_max - 1, math.floor(KV_SHARE * limits.kv_capacity_tokens))
    lengths = sorted({min(tokens, longest) for tokens in extent.prefills})
    shorts = [_batch(min(sequences, limits.batch_max), SHORT_PROMPT_TOKENS) for sequences in extent.shorts]
    room = min(limits.context_tokens_max, math.floor(KV_SHARE * limits.kv_capacity_tokens)) - 2 * DECODE_STEPS
    longs = [_batch(min(sequences, limits.batch_max), min(tokens, room)) for sequences, tokens in extent.longs]
    batches = tuple(dict.fromkeys(_shrunk(batch, limits) for batch in (*shorts, *longs)))
    offload_tokens = min(OFFLOAD_PROMPT_TOKENS, limits.context_tokens_max // 2)
    offload_max = min(limits.batch_max, math.floor(KV_SHARE * limits.kv_capacity_tokens / (2 * offload_tokens)))
    return Design(
        prefills=tuple(lengths) * extent.repeats,
        batches=batches,
        offloads=tuple(
            sorted(
                {(1, min(tokens, offload_tokens)) for tokens in OFFLOAD_SMALL_TOKENS if offload_max}
                | {(min(sequences, offload_max), offload_tokens) for sequences in OFFLOAD_SEQUENCES if offload_max}
            )
        ),
    )


def _batch(sequences: int, prompt_tokens: int) -> Batch:
    behind = math.ceil(sequences * prompt_tokens / CHUNK_TOKENS_LEAST)
    return Batch(sequences=sequences, prompt_tokens=prompt_tokens, output_tokens=DECODE_STEPS + behind)


def _shrunk(batch: Batch, limits: EngineLimits) -> Batch:
    """With as many sequences as fit."""
    each = batch.prompt_tokens + batch.output_tokens
    fit = min(math.floor(KV_SHARE * limits.kv_capacity_tokens / each), PREFILL_BUDGET_TOKENS // batch.prompt_tokens)
    return batch if fit >= batch.sequences else _batch(max(1, fit), batch.prompt_tokens)
