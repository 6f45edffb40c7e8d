"""What a full engine does to requests that are alike: throughput, work and decode time (QLM sections 2.4 and 6).

Continuous batching keeps a batch of B sequences decoding. A sequence holds its prompt and what it has produced so far, in the mean over a
full engine E[O^2] / (2 E[O]) tokens (the age of a renewal process, which is also what it has left). B is limited three times:

- by `batch_max`;
- by KV: agents keep room for the prompt and the expected output of each, and engines for what it really holds;
- by prefill: a step takes in `PREFILL_CHUNK_TOKENS` prompt tokens at most, so that many over the prompt's tokens join in a step, and each
  stays E[O] steps. With long prompts this binds, and each request then pays for whole steps of a small batch.

`qlm_core.service_arrays` has the same formulas for many classes at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.distribution import Normal, normal_quantile
from qlm_core.instance import BATCH_MAX_DEFAULT, PREFILL_CHUNK_TOKENS
from qlm_core.profile import HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Requests with this mean prompt and this distribution of output tokens on one engine. All times are of the hardware's clock.

    `batch`: B. `step_s`: d, one decode step over a full batch. `token_s`: 1 / Theta, engine time of one output token in a full batch.
    `prefill_s`: P, of one request by itself. `prefill_work_s`: what a prefill adds to a full engine. `left_tokens`: mean output tokens that
    a running request still has to make. `sequence_s`: what one more sequence adds to a step."""

    output: Normal
    batch: float
    step_s: float
    token_s: float
    prefill_s: float
    prefill_work_s: float
    left_tokens: float
    sequence_s: float
    step_base_s: float

    @property
    def work(self) -> Normal:
        """Engine time of one request: its known prompt work and its unknown output over Theta (equation 2, which leaves the prompt out)."""
        return self.output.scaled(self.token_s).shifted(self.prefill_work_s)

    @property
    def batch_left_s(self) -> float:
        """Decode work that a full batch still holds whenever a sequence of it ends: work ahead up to this much delays nobody."""
        return self.left_tokens * self.step_s

    def decode(self, sequences: float, behind: float, output: Normal | None = None) -> Normal:
        """D = O * epsilon * d (equation 4) in a batch of `sequences`, with `behind` requests waiting for slots that become free.
        epsilon - 1 is the time of the prefills of those that join, batch / E[O] in each step, over that of the step: a longer output lets
        more of them join. `output`: what the request itself has to make, where more is known of it than of the others."""
        batch = min(self.batch, max(1.0, sequences))
        joining = min(behind, batch)
        return (output or self.output).scaled(self._step_s(batch) + joining * self.prefill_work_s / self.output.mean)

    def drain(self, in_flight: float, full: bool, behind: float, longest_tokens: float | None = None) -> Normal:
        """Time from the last start until the last of `in_flight` requests ends (the maximum of equation 5). `full`: the batch was full, so
        the others are on their way already. `behind`: requests that take the free slots meanwhile. `longest_tokens`: of the longest of
        them, where more than mean and variance is known.

        Steps: the longest of the outputs. Every sequence adds to a step only as long as it lives."""
        count = min(self.batch, max(1.0, in_flight))
        longest = longest_of(self.output, count)
        if longest_tokens is not None:
            longest = Normal(longest_tokens, longest.variance)
        own_tokens = count * (self.left_tokens if full else self.output.mean)
        room_tokens = max(0.0, self.batch * longest.mean - own_tokens)
        joining = min(behind, room_tokens / self.output.mean)
        shared_s = self.sequence_s * (min(own_tokens, self.batch * longest.mean) + joining * self.output.mean)
        return longest.scaled(self.step_base_s).shifted(shared_s + joining * self.prefill_work_s)

    def _step_s(self, sequences: float) -> float:
        return self.step_base_s + self.sequence_s * sequences


def service(
    prompt_tokens: float,
    output: Normal,
    hardware: HardwareProfile,
    batch_max: float = BATCH_MAX_DEFAULT,
    *,
    prompt_variance: float = 0.0,
) -> Service:
    """The service of requests with `prompt_tokens` >= 0 in the mean, which vary by `prompt_variance` >= 0 (attention's part of a prefill
    grows with the square), and `output` tokens of a mean > 0. Raises ValueError otherwise."""
    _check("prompt_tokens", prompt_tokens)
    _check("prompt_variance", prompt_variance)
    _check("batch_max", batch_max, low=1.0)
    if output.mean <= 0.0:
        raise ValueError(f"an output has a mean above zero tokens, got {output.mean}")
    left_tokens = output.second_moment / (2.0 * output.mean)
    context_tokens = prompt_tokens + left_tokens
    by_kv = hardware.kv_capacity_tokens / (prompt_tokens + max(left_tokens, output.mean))
    by_prefill = output.mean * PREFILL_CHUNK_TOKENS / max(1.0, prompt_tokens)
    batch = max(1.0, min(batch_max, by_kv, by_prefill))
    prefill_work_s = hardware.prefill_work_s(prompt_tokens, prompt_tokens * prompt_tokens + prompt_variance)
    step_base_s = hardware.decode_step_s(0.0, 0.0)
    sequence_s = hardware.decode_step_s(1.0, context_tokens) - step_base_s
    step_s = step_base_s + sequence_s * batch
    return Service(
        output=output,
        batch=batch,
        step_s=step_s,
        token_s=step_s / batch,
        prefill_s=hardware.prefill_s(0.0) + prefill_work_s,
        prefill_work_s=prefill_work_s,
        left_tokens=left_tokens,
        sequence_s=sequence_s,
        step_base_s=step_base_s,
    )


def throughput_tokens_per_s(prompt_tokens: float, output: Normal, hardware: HardwareProfile, batch_max: float = BATCH_MAX_DEFAULT) -> float:
    """Theta: output tokens a second of a full engine between prefills (section 2.4, insight 1)."""
    return 1.0 / service(prompt_tokens, output, hardware, batch_max).token_s


def service_time(
    requests: float, prompt_tokens: float, output: Normal, hardware: HardwareProfile, batch_max: float = BATCH_MAX_DEFAULT
) -> Normal:
    """Seconds of a full engine's time for `requests` >= 0 requests that hold `prompt_tokens` in all: the terms of equation 2 with the known
    prompt work added. The variance is that of the outputs alone, since the prompts are known."""
    _check("requests", requests)
    _check("prompt_tokens", prompt_tokens)
    if requests == 0.0:
        return Normal.point(0.0)
    return service(prompt_tokens / requests, output, hardware, batch_max).work.repeated(requests)


def longest_of(output: Normal, count: float) -> Normal:
    """The largest of `count` >= 1 independent outputs: its mean by Blom's approximation, its variance by the Gumbel limit."""
    if count <= 1.0 or output.variance == 0.0:
        return output
    score = normal_quantile((count - 0.375) / (count + 0.25))
    shrink = min(1.0, math.pi**2 / (12.0 * math.log(count)))
    return Normal(output.mean + output.deviation * score, output.variance * shrink)


def _check(name: str, value: float, low: float = 0.0) -> None:
    if not (math.isfinite(value) and value >= low):
        raise ValueError(f"{name} is a finite number >= {low:g}, got {value}")
