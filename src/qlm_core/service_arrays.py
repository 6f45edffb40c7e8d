"""`qlm_core.prediction_service` for many classes of requests at once: the same formulas on arrays, a test holds them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from qlm_core.distribution import normal_quantile
from qlm_core.instance import PREFILL_CHUNK_TOKENS
from qlm_core.normal_arrays import Floats
from qlm_core.profile import HardwareProfile

Integers = NDArray[np.int64]

_SCORES_MAX = 4_096
"""Batches beyond it count as this many when the longest output is looked for."""


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

    @classmethod
    def of(cls, engines: Sequence[tuple[HardwareProfile, float]]) -> EngineColumns:
        """Of (profile, batch_max) pairs."""
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
class ServiceColumns:
    """One `Service` in each place of the arrays; `output` is its mean, `output_variance` its variance. `joining_s`: prefills that one seat
    lets in for each of its tokens, while others wait for it."""

    output: Floats
    output_variance: Floats
    batch: Floats
    step_s: Floats
    token_s: Floats
    prefill_s: Floats
    prefill_work_s: Floats
    left_tokens: Floats
    sequence_s: Floats
    step_base_s: Floats
    joining_s: Floats

    @property
    def batch_left_s(self) -> Floats:
        """As `Service.batch_left_s`."""
        return self.left_tokens * self.step_s

    def part(self, begin: int | None, end: int | None) -> ServiceColumns:
        """Those of the places [begin, end)."""
        return ServiceColumns(*(getattr(self, name)[begin:end] for name in ServiceColumns.__slots__))

    def decode_token_s(self, sequences: Floats, behind: Floats) -> Floats:
        """Seconds of one output token of a request: `Service.decode` is the output times this."""
        batch = np.minimum(self.batch, np.maximum(1.0, sequences))
        joining = np.minimum(behind, batch)
        return self.step_base_s + self.sequence_s * batch + joining * self.joining_s

    def drain(self, longest: Floats, in_flight: Floats, behind: Floats) -> Floats:
        """`Service.drain`: until the one has ended that makes `longest` tokens, beside `in_flight` that share the batch, which was full
        where that is more than it holds."""
        count = np.minimum(self.batch, np.maximum(1.0, in_flight))
        own_tokens = count * np.where(in_flight > self.batch, self.left_tokens, self.output)
        batch_tokens = self.batch * longest
        joining = np.minimum(behind, np.maximum(0.0, batch_tokens - own_tokens) / self.output)
        shared_s = self.sequence_s * (np.minimum(own_tokens, batch_tokens) + joining * self.output)
        drain_s: Floats = longest * self.step_base_s + shared_s + joining * self.prefill_work_s
        return drain_s


def services(
    engine: EngineColumns, of: Integers, prompt_tokens: Floats, prompt_variance: Floats, output: Floats, output_variance: Floats
) -> ServiceColumns:
    """`service` of classes [classes], each on the engine with number `of`: mean prompts >= 0 and outputs of a mean > 0."""
    left = (output_variance + output * output) / (2.0 * output)
    context = prompt_tokens + left
    by_kv = engine.kv_tokens[of] / (prompt_tokens + np.maximum(left, output))
    by_prefill = output * PREFILL_CHUNK_TOKENS / np.maximum(1.0, prompt_tokens)
    batch = np.maximum(1.0, np.minimum(np.minimum(engine.batch_max[of], by_kv), by_prefill))
    base = engine.step_base_s[of]
    sequence = engine.sequence_s[of] + engine.context_token_s[of] * context
    step = base + sequence * batch
    prefill_work = engine.prefill_token_s[of] * prompt_tokens + engine.prefill_square_s[of] * (prompt_tokens**2 + prompt_variance)
    return ServiceColumns(
        output=output,
        output_variance=output_variance,
        batch=batch,
        step_s=step,
        token_s=step / batch,
        prefill_s=engine.prefill_base_s[of] + prefill_work,
        prefill_work_s=prefill_work,
        left_tokens=left,
        sequence_s=sequence,
        step_base_s=base,
        joining_s=prefill_work / output,
    )


def longest_of_each(output: Floats, variance: Floats, count: Floats) -> tuple[Floats, Floats]:
    """`prediction_service.longest_of`; its score between whole counts goes evenly."""
    counts, scores = _scores()
    several = (count > 1.0) & (variance > 0.0)
    score = np.where(several, np.interp(count, counts, scores), 0.0)
    shrink = np.minimum(1.0, math.pi**2 / (12.0 * np.log(np.maximum(count, 1.0 + 1e-9))))
    return output + np.sqrt(variance) * score, variance * np.where(several, shrink, 1.0)


@cache
def _scores() -> tuple[Floats, Floats]:
    """Blom's score of the largest of n = 1, 2, 3, ..."""
    counts = np.arange(1.0, _SCORES_MAX + 1.0)
    return counts, np.array([normal_quantile((count - 0.375) / (count + 0.25)) for count in counts.tolist()])
