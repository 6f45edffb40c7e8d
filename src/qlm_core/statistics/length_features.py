"""Features of an answer's length that are known at arrival, as hashed features of a linear model (Weinberger et al., "Feature hashing for
large scale multitask learning", ICML 2009). The same request gives the same features in every process: CRC-32, never `hash()`.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.vocabulary.group import prompt_class

BUCKETS = 1 << 14
"""Features share so many weights: with 400 tenants some 2,000 are used, and a clash costs one feature of about ten."""
PROMPT_BUCKETS = 1 << 13
"""The last of them are for prompts, most of which occur only once: they clash with each other alone."""
ANCHOR_TOKENS = 100.0
"""Weights are logarithms of factors on so many tokens."""
HINT_RATIO_MAX = 5.0
"""Largest logarithm of a hint over what is expected without it that counts: a factor of about 150 either way."""
PROMPT_HASHES_MAX = 3
PREFIX_LENGTHS = (16, 64, 512)
"""A prompt is known by its first so many tokens (or four times as many characters): a template, a system prompt, a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFacts:
    """A request at arrival. `output_tokens_limit`: its own limit, 0 for none. `prompt_hashes`: of its prefixes, the shortest first.
    `sampling`: a word for how it is sampled ("" for the defaults). `hint_tokens`: the client's own expectation, 0 for none."""

    model: str
    tenant: str = ""
    application: str = ""
    prompt_tokens: int
    output_tokens_limit: int = 0
    prompt_hashes: tuple[int, ...] = ()
    sampling: str = ""
    hint_tokens: int = 0


def features_of(facts: LengthFacts) -> tuple[int, ...]:
    """The features that are present (their value is one), without repeats: at most 13, the served model's first, then its tenant's."""
    model, tenant = facts.model, f"{facts.model}|{facts.tenant}"
    prompt = prompt_class(facts.prompt_tokens)
    names = [f"m{model}", f"t{tenant}", f"k{model}|{prompt}", f"p{model}|{_half_doublings(facts.prompt_tokens)}", f"x{tenant}|{prompt}"]
    if facts.application:
        names.append(f"a{tenant}|{facts.application}")
    if facts.output_tokens_limit:
        names.append(f"o{tenant}|{_half_doublings(facts.output_tokens_limit)}")
    if facts.sampling:
        names += [f"s{model}|{facts.sampling}", f"u{tenant}|{facts.sampling}"]
    prompts = [f"h{number}{model}|{each}" for number, each in enumerate(facts.prompt_hashes[:PROMPT_HASHES_MAX])]
    return tuple(dict.fromkeys([*map(_bucket, names), *map(_prompt_bucket, prompts)]))


def hint_feature(facts: LengthFacts) -> int:
    """The feature whose weight is how far this tenant's hints are followed: 0 not at all, 1 to the letter."""
    return _bucket(f"e{facts.model}|{facts.tenant}")


def hint_value(hint_tokens: float, without_hint: float) -> float:
    """The value of that feature: the logarithm of the hint over what is expected without it, bounded; 0 without a hint. `without_hint`: the
    sum of the weights of the other features."""
    if hint_tokens < 1.0:
        return 0.0
    return min(max(math.log(hint_tokens / ANCHOR_TOKENS) - without_hint, -HINT_RATIO_MAX), HINT_RATIO_MAX)


def hashes_of_tokens(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Hashes of the prefixes of a prompt of token ids, as far as it is long enough for them."""
    return tuple(zlib.crc32(struct.pack(f"<{length}I", *token_ids[:length])) for length in PREFIX_LENGTHS if len(token_ids) >= length)


def hashes_of_text(text: str) -> tuple[int, ...]:
    """Hashes of the prefixes of a text."""
    return tuple(zlib.crc32(text[: 4 * length].encode("utf-8", "surrogatepass")) for length in PREFIX_LENGTHS if len(text) >= 4 * length)


def _half_doublings(tokens: int) -> int:
    return round(2.0 * math.log2(max(1, tokens)))


def _bucket(name: str) -> int:
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % (BUCKETS - PROMPT_BUCKETS)


def _prompt_bucket(name: str) -> int:
    return BUCKETS - PROMPT_BUCKETS + zlib.crc32(name.encode()) % PROMPT_BUCKETS
