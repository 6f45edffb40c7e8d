"""How a full engine serves requests that are alike: throughput, work and decode time (QLM sections 2.4 and 6).

Continuous batching keeps a batch of B sequences decoding. A sequence holds its prompt and its output so far, on average over a
full engine E[O^2] / (2 E[O]) tokens (the age of a renewal process, which is also what it has left). B is limited three times:

- by `batch_max`;
- by KV: agents keep room for the prompt and the expected output of each (`reserved_tokens`); the next one fits half of the time into
  what is left of the last;
- by prefill: a step takes in `PREFILL_CHUNK_TOKENS` prompt tokens at most, so that many over the prompt's tokens join in a step, and each
  stays E[O] steps. With long prompts this binds, and each request then pays for whole steps of a small batch.

The formulas are those of `ServiceFigures`, for numbers and for arrays alike; `Service` has those of one class, as values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Generic

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from qlm_core.profiles.hardware_profile import HardwareProfile, Number, prefill_shares
from qlm_core.statistics.distribution import Normal, normal_quantile
from qlm_core.statistics.normal_arrays import Floats
from qlm_core.vocabulary.instance import BATCH_MAX_DEFAULT, PREFILL_CHUNK_TOKENS

Integers = NDArray[np.int64]

_SCORES_MAX = 4_096
"""Batches beyond it count as this many for the longest output."""


SERVING = 8
"""Fields of `EngineColumns` that serving depends on: all but the loads of models."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineColumns:
    """Engines (one model on one instance each) as arrays [engines]: the hardware profile with its `slowdown` in the times."""

    batch_max: Floats
    kv_tokens: Floats
    step_base_s: Floats
    sequence_s: Floats
    context_token_s: Floats
    prefill_base_s: Floats
    prefill_token_s: Floats
    prefill_square_s: Floats
    warm_s: Floats
    cold_s: Floats

    @property
    def rows(self) -> tuple[Floats, ...]:
        """Those that serving depends on, in their order."""
        return tuple(getattr(self, name) for name in EngineColumns.__slots__[:SERVING])

    @classmethod
    def of(cls, engines: Sequence[tuple[HardwareProfile, float]]) -> EngineColumns:
        """Makes columns of (profile, batch_max) pairs."""
        rows = np.array([_engine_row(hardware, batch_max) for hardware, batch_max in engines], dtype=np.float64)
        return cls(*np.ascontiguousarray(rows.reshape(len(engines), 10).T))


def _engine_row(hardware: HardwareProfile, batch_max: float) -> tuple[float, ...]:
    scale = hardware.slowdown * 1e-3
    return (
        batch_max,
        hardware.kv_capacity_tokens,
        hardware.decode_a_ms * scale,
        hardware.decode_b_ms_per_seq * scale,
        hardware.decode_c_ms_per_context_token * scale,
        hardware.prefill_base_ms * scale,
        hardware.prefill_ms_per_token * scale,
        hardware.prefill_ms_per_token_squared * scale,
        hardware.swap_s(warm=True),
        hardware.swap_s(warm=False),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ServiceFigures(Generic[Number]):
    """A class of requests, or one in each place of arrays, by the mean and variance of its outputs. Times are of the hardware's clock.

    `batch`: B. `step_s`: d, one decode step over a full batch. `token_s`: 1 / Theta, engine time of one output token in a full batch.
    `prefill_s`: P, of one request by itself. `prefill_work_s`: what a prefill adds to a full engine; `prefill_tokens`: of its prompt, those
    that the prefix cache leaves to it. `left_tokens`: mean output tokens that a running request still has to make. `sequence_s`: what one
    more sequence adds to a step. `joining_s`: prefills that one seat lets in for each of its tokens, while others wait for it."""

    output: Number
    output_variance: Number
    batch: Number
    step_s: Number
    token_s: Number
    prefill_s: Number
    prefill_work_s: Number
    prefill_tokens: Number
    left_tokens: Number
    sequence_s: Number
    step_base_s: Number
    joining_s: Number

    @property
    def batch_left_s(self) -> Number:
        """Decode work that a full batch still holds whenever a sequence of it ends: work ahead up to this much delays nobody."""
        return self.left_tokens * self.step_s

    @property
    def rows(self) -> list[Number]:
        """All fields, in their order."""
        return [getattr(self, name) for name in ServiceFigures.__slots__]

    def decode_token_s(self, sequences: Number, behind: Number) -> Number:
        """Seconds of one output token: epsilon * d (equation 4) in a batch of `sequences`, with `behind` requests waiting for slots that
        become free. epsilon - 1 is the time of the prefills of those that join, batch / E[O] in each step, over that of the step: a longer
        output lets more of them join."""
        batch = np.minimum(self.batch, np.maximum(1.0, sequences))
        token_s: Number = self.step_base_s + self.sequence_s * batch + np.minimum(behind, batch) * self.joining_s
        return token_s

    def drain(self, longest: Number, in_flight: Number, full: Number, behind: Number) -> Number:
        """Seconds from the last start until the last of `in_flight` requests ends (the maximum of equation 5), which makes `longest`
        tokens. `full`: 1 where the batch was full, so the others are on their way already, else 0. `behind`: requests that take the free
        slots meanwhile. Every sequence adds to a step only as long as it lives."""
        count = np.minimum(self.batch, np.maximum(1.0, in_flight))
        own_tokens = count * (full * self.left_tokens + (1.0 - full) * self.output)
        batch_tokens = self.batch * longest
        joining = np.minimum(behind, np.maximum(0.0, batch_tokens - own_tokens) / self.output)
        shared_s = self.sequence_s * (np.minimum(own_tokens, batch_tokens) + joining * self.output)
        drain_s: Number = longest * self.step_base_s + shared_s + joining * self.prefill_work_s
        return drain_s


ServiceColumns = ServiceFigures[Floats]


def services(
    engine: EngineColumns,
    of: Integers,
    prompt_tokens: Floats,
    prompt_variance: Floats,
    output: Floats,
    output_variance: Floats,
    uncached_share: Floats,
) -> ServiceColumns:
    """Classes [classes], each on the engine with number `of`: mean prompts >= 0, whose variance counts since attention's part of a prefill
    grows with the square, and outputs of a mean > 0. `uncached_share`: of the prompts, what is computed; KV is that of whole ones."""
    return _figures([row[of] for row in engine.rows], prompt_tokens, prompt_variance, output, output_variance, uncached_share)


def _figures(
    engine: Sequence[Number],
    prompt_tokens: Number,
    prompt_variance: Number,
    output: Number,
    output_variance: Number,
    uncached_share: Number,
) -> ServiceFigures[Number]:
    """`engine`: what serving depends on, in the order of `EngineColumns`."""
    batch_max, kv_tokens, step_base_s, sequence_s, context_token_s, prefill_base_s, prefill_token_s, prefill_square_s = engine
    left = (output_variance + output * output) / (2.0 * output)
    held = prompt_tokens + reserved_tokens(output, output_variance, output)
    by_kv = (kv_tokens - 0.5 * (prompt_tokens + output)) / held
    linear, squared = prefill_shares(uncached_share)
    prefill_tokens = prompt_tokens * linear
    by_prefill = output * PREFILL_CHUNK_TOKENS / np.maximum(1.0, prefill_tokens)
    batch: Number = np.maximum(1.0, np.minimum(np.minimum(batch_max, by_kv), by_prefill))
    sequence = sequence_s + context_token_s * (prompt_tokens + left)
    step = step_base_s + sequence * batch
    prefill_work = prefill_token_s * prefill_tokens + prefill_square_s * (prompt_tokens * prompt_tokens + prompt_variance) * squared
    return ServiceFigures(
        output=output,
        output_variance=output_variance,
        batch=batch,
        step_s=step,
        token_s=step / batch,
        prefill_s=prefill_base_s + prefill_work,
        prefill_work_s=prefill_work,
        prefill_tokens=prefill_tokens,
        left_tokens=left,
        sequence_s=sequence,
        step_base_s=step_base_s,
        joining_s=prefill_work / output,
    )


def reserved_tokens(output: Number, variance: Number, mean: Number) -> Number:
    """Output tokens that a seat has reserved on average, of a lognormal output. Agents reserve `mean`, that of all classes, and half as
    much again whenever a request has made what is reserved: 0.4 mean^2 + 0.6 output^2 over its steps if it makes more than the mean."""
    s = np.sqrt(np.log1p(variance / (output * output))) + 1e-9
    z = np.log(mean / output) / s + 0.5 * s
    more = 0.4 * mean * mean / output * ndtr(-z) + 0.6 * output * np.exp(s * s) * ndtr(2.0 * s - z)
    reserved: Number = mean * ndtr(z - s) + more
    return reserved


def longest_of_each(output: Floats, variance: Floats, count: Floats) -> tuple[Floats, Floats]:
    """`longest_of` of many; its score between whole counts goes evenly."""
    counts, scores = _scores()
    several = (count > 1.0) & (variance > 0.0)
    score = np.where(several, np.interp(count, counts, scores), 0.0)
    shrink = np.minimum(1.0, math.pi**2 / (12.0 * np.log(np.maximum(count, 1.0 + 1e-9))))
    return output + np.sqrt(variance) * score, variance * np.where(several, shrink, 1.0)


def longest_of(output: Normal, count: float) -> Normal:
    """The largest of `count` >= 1 independent outputs: its mean by Blom's approximation, its variance by the Gumbel limit."""
    if count <= 1.0 or output.variance == 0.0:
        return output
    shrink = min(1.0, math.pi**2 / (12.0 * math.log(count)))
    return Normal(output.mean + output.deviation * _score(count), output.variance * shrink)


def _score(count: float) -> float:
    """Blom's, of the largest of so many."""
    return normal_quantile((count - 0.375) / (count + 0.25))


@cache
def _scores() -> tuple[Floats, Floats]:
    """Normal scores of the largest of n = 1, 2, 3, ..."""
    counts = np.arange(1.0, _SCORES_MAX + 1.0)
    return counts, np.array([_score(count) for count in counts.tolist()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One class, with its output as a distribution."""

    output: Normal
    batch: float
    step_s: float
    token_s: float
    prefill_s: float
    prefill_work_s: float
    left_tokens: float
    sequence_s: float
    step_base_s: float
    figures: ServiceFigures[float] = field(repr=False, compare=False)

    @property
    def work(self) -> Normal:
        """Engine time of one request: its known prompt work, which makes the first token, and the rest of its unknown output over Theta
        (equation 2, which leaves the prompt out)."""
        return self.output.shifted(-1.0).scaled(self.token_s).shifted(self.prefill_work_s)

    @property
    def batch_left_s(self) -> float:
        return self.figures.batch_left_s

    def decode(self, sequences: float, behind: float, output: Normal | None = None) -> Normal:
        """D = O * epsilon * d (equation 4). `output`: what the request itself has to make, where more is known of it than of the others."""
        return (output or self.output).scaled(float(self.figures.decode_token_s(sequences, behind)))

    def drain(self, in_flight: float, full: bool, behind: float, longest_tokens: float | None = None) -> Normal:
        """As `ServiceFigures.drain`. `longest_tokens`: of the longest of them, where more than mean and variance is known."""
        longest = longest_of(self.output, min(self.batch, max(1.0, in_flight)))
        most = longest.mean if longest_tokens is None else longest_tokens
        drain_s = float(self.figures.drain(most, in_flight, float(full), behind))
        return Normal(drain_s, longest.variance * self.step_base_s**2)


def service(
    prompt_tokens: float,
    output: Normal,
    hardware: HardwareProfile,
    batch_max: float = BATCH_MAX_DEFAULT,
    *,
    prompt_variance: float = 0.0,
    uncached_share: float = 1.0,
) -> Service:
    """The service of requests with `prompt_tokens` >= 0 on average, which vary by `prompt_variance` >= 0, and `output` tokens of a mean
    > 0. Raises ValueError otherwise. `uncached_share`: as in `services`."""
    least = (("prompt_tokens", prompt_tokens, 0.0), ("prompt_variance", prompt_variance, 0.0), ("batch_max", batch_max, 1.0))
    for name, value, low in least:
        if not (math.isfinite(value) and value >= low):
            raise ValueError(f"{name} is a finite number >= {low:g}, got {value}")
    if output.mean <= 0.0:
        raise ValueError(f"an output has a mean above zero tokens, got {output.mean}")
    engine = _engine_row(hardware, batch_max)[:SERVING]
    found = _figures(engine, prompt_tokens, prompt_variance, output.mean, output.variance, uncached_share)
    return Service(
        output=output,
        batch=float(found.batch),
        step_s=float(found.step_s),
        token_s=float(found.token_s),
        prefill_s=found.prefill_s,
        prefill_work_s=found.prefill_work_s,
        left_tokens=found.left_tokens,
        sequence_s=found.sequence_s,
        step_base_s=found.step_base_s,
        figures=found,
    )
