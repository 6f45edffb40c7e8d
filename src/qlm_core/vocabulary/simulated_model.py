"""The answer of a simulated model: a function of the model's name and the prompt's token ids alone.

So greedy output is the same on any instance, after any eviction, and when it is resumed from prompt + produced tokens. Sampling
parameters other than `max_tokens` and `ignore_eos` do not change it. A prompt may state how long an answer it wants: if its last
token id is LENGTH_TOKEN_BASE + n, the answer has n tokens (replayed traces do that); else the length is drawn from a lognormal
distribution by the prompt's hash.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

LENGTH_TOKEN_BASE = 1 << 24
"""Token ids from here up to LENGTH_TOKEN_BASE + ANSWER_TOKENS_MAX are allowed as the last id of a prompt of a simulated model."""

ANSWER_TOKENS_MAX = 1 << 20
"""Longest answer that a prompt can ask for, in tokens."""

ANSWER_TOKENS_MEDIAN = 180
"""Median of the drawn length, close to ShareGPT's."""

ANSWER_LOG_SIGMA = 0.8
"""Standard deviation of the drawn length's logarithm."""

BYTES_PER_TEXT_TOKEN = 4
"""Text of simulated models counts as one token for each four bytes of its UTF-8 form, rounded up."""

TOKEN_BYTES = 4
"""Output tokens are stored and sent as little-endian uint32."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def prompt_digest(model: str, prompt_ids: Sequence[int]) -> int:
    """64 bits that stand for the model and the prompt."""
    digest = hashlib.blake2b(model.encode() + b"\0", digest_size=8)
    digest.update(struct.pack(f"<{len(prompt_ids)}I", *prompt_ids))
    return int.from_bytes(digest.digest(), "little")


def answer_tokens(digest: int, start: int, count: int, vocabulary_size: int) -> bytes:
    """Tokens `start` to `start + count` of the answer to a prompt, as little-endian uint32, each below `vocabulary_size`."""
    positions = np.arange(start, start + count, dtype=np.uint64)
    return (_mixed(np.uint64(digest) + positions * _GOLDEN) % np.uint64(vocabulary_size)).astype("<u4").tobytes()


def answer_token(digest: int, index: int, vocabulary_size: int) -> int:
    """Token `index` of the answer to a prompt."""
    return int.from_bytes(answer_tokens(digest, index, 1, vocabulary_size), "little")


def answer_length(prompt_ids: Sequence[int]) -> int:
    """Tokens in the whole answer, >= 1, before `output_tokens_max` cuts it. The same for all models."""
    if prompt_ids[-1] >= LENGTH_TOKEN_BASE:
        return max(1, min(prompt_ids[-1] - LENGTH_TOKEN_BASE, ANSWER_TOKENS_MAX))
    quantile = (prompt_digest("", prompt_ids) + 0.5) / 2.0**64
    deviation = NormalDist().inv_cdf(min(max(quantile, 1e-12), 1 - 1e-12))
    return min(max(1, round(ANSWER_TOKENS_MEDIAN * math.exp(ANSWER_LOG_SIGMA * deviation))), ANSWER_TOKENS_MAX)


def text_token_count(text: str) -> int:
    """Tokens of a text prompt of a simulated model: the stated approximation."""
    return -(-len(text.encode()) // BYTES_PER_TEXT_TOKEN)


def text_token_ids(text: str, vocabulary_size: int) -> list[int]:
    """Token ids of a text prompt: a hash of each four bytes of its UTF-8 form."""
    encoded = text.encode()
    padded = encoded + bytes(-len(encoded) % BYTES_PER_TEXT_TOKEN)
    pieces = np.frombuffer(padded, dtype="<u4").astype(np.uint64)
    return [int(token) for token in _mixed(pieces) % np.uint64(vocabulary_size)]


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's output function; unsigned arithmetic wraps on purpose."""
    mixed = (values ^ (values >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    result: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result
