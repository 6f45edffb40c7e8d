"""An engine that batches statically, by the step times of a hardware profile: padded prefill, then decode steps until the longest output of
the batch ends (UELLM, section 4.2). All requests are there at time 0, as in the authors' program; one batch runs at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.evaluate.server import Server, serve
from benchmarks.evaluate.workloads import Jobs
from qlm_core.operations.batching import BATCH_MAX, SLO_ODBS, Batch, BatchRequests, Floats, Ints
from qlm_core.profiles.hardware_profile import HardwareProfile

SLO_DBS = replace(SLO_ODBS, w1=0.0)
ODBS = replace(SLO_ODBS, w2=0.0)
"""Variants that UELLM compares with."""
OUTPUT_MEAN, OUTPUT_SHAPE = 194.0, 2.46
"""Output tokens of ChatGLM2-6B to 100 Alpaca questions (HYIUYOU/UELLM, finetuning/data/dealoutput.py): mean 194, deviation 124; as a gamma
distribution (p90 336 and p99 539 there, 358 and 580 here)."""
OUTPUT_MAX = 2048
PROMPT_MEDIAN, PROMPT_LOG_SIGMA = 11.0, 0.6
"""Prompt tokens of Alpaca: median 11, p90 23."""
SLO_S = (1.0, 350.0)
"""Section 5.1: "completely random"."""
PROGRAM_SLO_S = ((220, 250), (180, 220), (150, 180), (100, 120), (90, 100))
"""SLOs of the authors' program, in the order of its requests."""
CLASS_TOKENS = 102
"""Lengths are predicted in ten classes up to 1,024 tokens, as S3 does; a prediction is the upper end of its class."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """`requests`: as a scheduler sees them; `output_tokens`: the actual ones."""

    requests: BatchRequests
    output_tokens: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """`ends_s`: of each request from time 0. `decoded`: tokens decoded, those of ended requests in a batch included. `requeued`: runs that
    S3's supervisor ended."""

    ends_s: Floats
    decoded: int
    requeued: int = 0

    @property
    def makespan_s(self) -> float:
        return float(self.ends_s.max())


def alpaca_like(seed: int, count: int, accuracy: float = 0.8) -> Workload:
    """Requests of the evaluation. `accuracy`: share whose predicted length class is right; the others are one class off either way. 0.8 is
    UELLM's outside its training set (section 4.1)."""
    random = np.random.default_rng(seed)
    actual = np.clip(random.gamma(OUTPUT_SHAPE, OUTPUT_MEAN / OUTPUT_SHAPE, count), 1, OUTPUT_MAX).astype(np.int64)
    off = np.where(random.random(count) < accuracy, 0, random.choice((-1, 1), count))
    requests = BatchRequests(
        slo_s=random.uniform(*SLO_S, count),
        prompt_tokens=np.maximum(1, random.lognormal(np.log(PROMPT_MEDIAN), PROMPT_LOG_SIGMA, count)).astype(np.int64),
        output_tokens=np.maximum(1, -(-actual // CLASS_TOKENS) + off) * CLASS_TOKENS,
    )
    return Workload(requests=requests, output_tokens=actual)


def program_slos(workload: Workload, seed: int) -> Workload:
    """The same requests with SLOs as the authors' program draws them: whole seconds, a fifth of the requests from each range in turn."""
    random = np.random.default_rng(seed)
    fifth = len(workload.requests) // len(PROGRAM_SLO_S)
    slo_s = np.concatenate([random.integers(least, most + 1, fifth) for least, most in PROGRAM_SLO_S]).astype(np.float64)
    return replace(workload, requests=replace(workload.requests, slo_s=slo_s))


def batch_s(profile: HardwareProfile, prompt_tokens: Ints, output_tokens: Ints) -> float:
    """Seconds of a static batch: each request is as long as the longest, to its end."""
    size, prompt, output = len(prompt_tokens), int(prompt_tokens.max()), int(output_tokens.max())
    mean_context = size * (prompt + output / 2)
    return profile.prefill_s(0) + size * profile.prefill_work_s(prompt, prompt**2) + output * profile.decode_step_s(size, mean_context)


def serve_batches(workload: Workload, batches: Sequence[Batch], profile: HardwareProfile) -> Served:
    """One batch after the other; a request is answered when its batch ends."""
    ends_s = np.zeros(len(workload.requests))
    now_s, decoded = 0.0, 0
    for batch in batches:
        members = list(batch)
        now_s += batch_s(profile, workload.requests.prompt_tokens[members], workload.output_tokens[members])
        ends_s[members] = now_s
        decoded += len(members) * int(workload.output_tokens[members].max())
    return Served(ends_s=ends_s, decoded=decoded)


def serve_s3(workload: Workload, profile: HardwareProfile, capacity_tokens: int, batch_max: int) -> Served:
    """S3: bins by predicted length, the shortest first (as UELLM's authors serve them). Its supervisor ends a request at its predicted
    length and requeues it behind all others with twice that; it starts again, so there are at most log2(OUTPUT_MAX) rounds."""
    allowed, actual = workload.requests.output_tokens.copy(), workload.output_tokens
    ends_s = np.zeros(len(allowed))
    waiting = np.arange(len(allowed))
    now_s, decoded, requeued = 0.0, 0, 0
    while waiting.size:
        columns = BatchRequests(
            slo_s=workload.requests.slo_s[waiting],
            prompt_tokens=workload.requests.prompt_tokens[waiting],
            output_tokens=allowed[waiting],
        )
        for batch in reversed(pack_lengths(columns, capacity_tokens, batch_max)):
            members = waiting[list(batch)]
            produced = np.minimum(actual[members], allowed[members])
            now_s += batch_s(profile, workload.requests.prompt_tokens[members], produced)
            decoded += len(members) * int(produced.max())
            ends_s[members] = now_s
        waiting = waiting[actual[waiting] > allowed[waiting]]
        allowed[waiting] *= 2
        requeued += len(waiting)
    return Served(ends_s=ends_s, decoded=decoded, requeued=requeued)


def serve_continuous(workload: Workload, order: Ints, profile: HardwareProfile, seats: int) -> Served:
    """Continuous batching in `order`, on the simulated engine: a seat that a request leaves is taken at once; no padding."""
    prompts, outputs = workload.requests.prompt_tokens[order], workload.output_tokens[order]
    jobs = Jobs(arrived_s=np.zeros(len(order)), prompts=prompts, outputs=outputs)
    ends_s = np.zeros(len(order))
    ends_s[order] = serve(jobs, Server(profile=profile, seats=seats), "fcfs").end_s
    return Served(ends_s=ends_s, decoded=int(outputs.sum()))


def first_come(requests: BatchRequests, batch_max: int = BATCH_MAX) -> tuple[Batch, ...]:
    """UELLM's default batching (FIFO): requests as they stand, `batch_max` at a time."""
    return tuple(tuple(range(first, min(first + batch_max, len(requests)))) for first in range(0, len(requests), batch_max))


def pack_lengths(requests: BatchRequests, capacity_tokens: int, batch_max: int = BATCH_MAX) -> tuple[Batch, ...]:
    """S3: bin packing by predicted length (first fit decreasing), SLOs ignored. A bin holds `capacity_tokens` of output, or one longer
    request."""
    bins: list[list[int]] = []
    rest: list[int] = []
    for place in np.argsort(-requests.output_tokens, kind="stable"):
        tokens = int(requests.output_tokens[place])
        found = next((number for number, free in enumerate(rest) if tokens <= free and len(bins[number]) < batch_max), None)
        if found is None:
            bins.append([])
            rest.append(capacity_tokens)
            found = len(bins) - 1
        bins[found].append(int(place))
        rest[found] -= tokens
    return tuple(map(tuple, bins))


def padding_tokens(prompt_tokens: Ints, batches: tuple[Batch, ...]) -> int:
    """Padding of prompts to the longest of each batch (figure 3)."""
    return int(sum((prompt_tokens[list(batch)].max() - prompt_tokens[list(batch)]).sum() for batch in batches))


def decoded_tokens(output_tokens: Ints, batches: tuple[Batch, ...]) -> int:
    """Tokens that are decoded if each request goes on to the longest output of its batch (figure 3: b x O)."""
    return int(sum(len(batch) * output_tokens[list(batch)].max() for batch in batches))
