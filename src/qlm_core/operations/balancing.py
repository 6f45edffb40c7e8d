"""Balancers over columns of servers: who serves the next request (Kossmann et al., "Is the GPU half-empty or half-full?", 2024, sections 3
and 4.2). Pure; the planner's balancers and the benchmarks use these functions and no others.

**SAL (section 4.2, equation 2).** The text of the paper keeps the words around its equation, from which it follows. A request waits on a
server until two things hold:

- the prompts that wait there are computed, its own last: (queued tokens + own prompt tokens) / token rate;
- its prompt has KV: what the free KV lacks, own prompt tokens - free tokens, at the rate at which ending requests free it.

Both pass at the same time, so the later one counts: `max((queued + own) / token rate, (own - free) / freeing rate)`. The freeing rate: a
server that makes D output tokens a second ends D / O requests of O output tokens on average; each leaves the KV of its I prompt and O
output tokens. So it frees `D * (I + O) / O` tokens a second. Seconds also compare servers of different speeds. A second term below zero
says that KV is free: the first one counts then.

Between reports each request that is sent adds its prompt to the queued tokens and takes it from the free ones, as if none ended
(`Servers.add`). Of equal loads, as on idle servers, the least share of KV in use decides, which the paper leaves open.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlm_core.profiles.profile import HardwareProfile
from qlm_core.vocabulary.instance import PREFILL_CHUNK_TOKENS

Floats = NDArray[np.float64]


@dataclass(slots=True, kw_only=True, eq=False)
class Servers:
    """Servers as arrays [servers], in tokens and tokens a second: prompts that wait for their prefill, KV in use and in all, and the
    rates `token_rate` of prompts and `freeing_rate` of KV, both > 0. `lead_s`: seconds of a model swap before the request, 0 for none
    (the paper's servers have one model)."""

    queued: Floats
    kv_used: Floats
    kv_capacity: Floats
    token_rate: Floats
    freeing_rate: Floats
    lead_s: Floats

    def add(self, at: int, prompt_tokens: float) -> None:
        """Corrects a server's columns for a request that was sent since its report (section 4.2)."""
        self.queued[at] += prompt_tokens
        self.kv_used[at] += prompt_tokens


def server_waits_s(servers: Servers, prompt_tokens: float) -> Floats:
    """Seconds that a request would wait on each server: equation 2."""
    prefill_s = (servers.queued + prompt_tokens) / servers.token_rate
    kv_s = (servers.kv_used + prompt_tokens - servers.kv_capacity) / servers.freeing_rate
    return servers.lead_s + np.maximum(prefill_s, kv_s)


def server_aware(servers: Servers, prompt_tokens: float) -> int:
    """SAL: the server of the shortest wait; of equal ones the one with the least share of KV in use, then the first."""
    waits_s = server_waits_s(servers, prompt_tokens)
    best = (waits_s <= waits_s.min()).nonzero()[0]
    return int(best[0]) if len(best) == 1 else int(best[(servers.kv_used[best] / servers.kv_capacity[best]).argmin()])


def least_kv(servers: Servers) -> int:
    """The server with the least share of KV in use of those with the least `lead_s`, then the first."""
    return int(np.where(servers.lead_s <= servers.lead_s.min(), servers.kv_used / servers.kv_capacity, np.inf).argmin())


def least_loaded(loads: Sequence[int]) -> int:
    """The server with the fewest requests, then the first."""
    return loads.index(min(loads))


def random_server(count: int, seed: int, key: str) -> int:
    """One of `count` servers, all equally likely."""
    return draw(seed, key, 0) % count


def two_servers(count: int, seed: int, key: str) -> tuple[int, int]:
    """Two different ones of `count` servers at random (equal where there is one), of which the less loaded serves: power of two choices
    (Mitzenmacher, 2001)."""
    first = draw(seed, key, 1) % count
    return first, (first + 1 + draw(seed, key, 2) % max(1, count - 1)) % count


def draw(seed: int, key: str, number: int) -> int:
    """A pseudo-random number, a function of its arguments on every machine."""
    # A checksum alone is linear: draws for one key would differ by the same in all keys.
    mixed = zlib.crc32(f"{number}/{key}/{seed}".encode()) * 2_654_435_769 & 0xFFFF_FFFF
    return mixed ^ mixed >> 15


def prefill_rate(hardware: HardwareProfile, sequences: float, context_tokens: float, chunk_tokens: int = PREFILL_CHUNK_TOKENS) -> float:
    """Prompt tokens a second of an engine whose steps decode `sequences` and fill the rest of `chunk_tokens` with prompts."""
    prompt_tokens = max(1.0, chunk_tokens - sequences)
    return prompt_tokens / (hardware.decode_step_s(sequences, context_tokens) + hardware.prefill_work_s(prompt_tokens))


def freeing_rate(decode_tokens_per_s: float, prompt_tokens_mean: float, output_tokens_mean: float) -> float:
    """KV tokens a second that ending requests free."""
    return decode_tokens_per_s * (prompt_tokens_mean + output_tokens_mean) / output_tokens_mean
