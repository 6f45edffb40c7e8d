"""How many requests an engine runs at once: the batch as a decision (design, "One model of an engine").

A step takes `a + n (b + c context)` and the prefills of those that join, so a larger batch serves more requests a second and makes each of
them slower. Sizes are compared by rollouts, as in model predictive control: from the requests that run and wait, the engine's next
`HORIZON_OUTPUTS` outputs are simulated with arrivals at their rates and output lengths of their classes, the earliest deadline first, and
the requests that end in time are counted. So waits, postponed requests and lasting arrivals count as well as slow steps do.

Each choice draws one course of events and compares all sizes on it. Their values are averaged over about `CHOICES_KEPT` choices, and the
best is the size: one course says little, and a size that moves with each of them serves nobody.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np

from qlm_core.profiles.profile import HardwareProfile
from qlm_core.statistics.length_curve import FloatArray, LengthCurve

SIZES_PER_DOUBLING = 3
"""Sizes that are compared differ by a quarter."""

HORIZON_OUTPUTS = 2.0
"""Requests that arrive within so many mean outputs in the largest batch count. Others go on arriving for as long again: else a queue that
grows would cost nothing."""

REQUESTS_MAX = 256
"""Most requests of a course; of more, each stands for several, and a seat for as many."""

CHOICES_KEPT = 8
"""Choices over which values are averaged."""

MUCH_WORSE = 0.1
"""Of the share in time: smaller sizes than one that loses so much on a course are not compared on it."""

THROUGHPUT_SHARE = 1e-3
"""Weight of the throughput, relative to the largest, beside the share of requests in time: it decides where the latter are equal."""

NOT_COUNTED = -math.inf
"""Deadline of a request of a course that takes a seat and does not count."""

QUANTILES = 64
"""Output lengths are drawn from so many equally likely ones of the class."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassDemand:
    """Requests of one model and SLO class on an instance. `slo_s` > 0: infinite for those without a deadline; `first_token`: it bounds the
    first token. `arrivals_per_s`: that come to the instance. `running`: produced tokens and seconds to the deadline of each that runs;
    `waiting`: seconds to the first deadline and number of requests of each group. `prompt_tokens`: of one, on average."""

    slo_s: float
    first_token: bool
    arrivals_per_s: float
    running: Sequence[tuple[float, float]]
    waiting: Sequence[tuple[float, int]]
    prompt_tokens: float
    outputs: LengthCurve

    @property
    def requests(self) -> int:
        return len(self.running) + sum(count for _, count in self.waiting)


class BatchChoice:
    """The size of the batch of one model on one instance: `size`, at first `batch_max` >= 1, which is the largest. The number
    of the choice is the seed of its draws, so equal calls have equal results."""

    def __init__(self, batch_max: int) -> None:
        self._sizes = sizes(batch_max)
        self._values: list[float] = []
        self._choices = 0
        self.size = batch_max

    def choose(self, hardware: HardwareProfile, demands: Sequence[ClassDemand], *, slowdown: float = 1.0, share: float = 1.0) -> int:
        """Chooses again. `slowdown`: measured steps over those of the profile; `share` in (0, 1]: of the engine's time, that it has for
        these classes beside other models that wait. Costs O(REQUESTS_MAX)."""
        if all(each.first_token or each.slo_s == math.inf for each in demands):
            self.size, self._values = self._sizes[-1], []
            return self.size
        self._choices += 1
        course = _course(self._choices, hardware, demands, self._sizes[-1], slowdown, share)
        values = self._course_values(course)
        weight = 1.0 / min(self._choices, CHOICES_KEPT)
        kept = self._values or values
        self._values = [old + weight * (new - old) for old, new in zip(kept, values, strict=True)]
        self.size = max(zip(self._values, self._sizes, strict=True))[1]
        return self.size

    def _course_values(self, course: _Course) -> list[float]:
        """The value of each size on a course, ascending. Sizes above the most that run make no difference; below one that is much worse
        than the best, all count as that."""
        values: list[float] = []
        value, peak = 0.0, math.inf
        for size in reversed(self._sizes):
            if size < peak and (not values or value > max(values) - MUCH_WORSE):
                value, peak = course.value(size)
            values.append(value)
        return values[::-1]


@lru_cache(maxsize=64)
def sizes(batch_max: int) -> tuple[int, ...]:
    """Batch sizes that are compared, ascending, the last one `batch_max` >= 1."""
    steps = math.floor(SIZES_PER_DOUBLING * math.log2(batch_max))
    return tuple(sorted({round(batch_max * 2 ** (-step / SIZES_PER_DOUBLING)) for step in range(steps + 1)} | {1}))


@dataclass(frozen=True, slots=True)
class _Course:
    """The events of a course. `running`: a heap of tokens to the end and seconds to the deadline; `arrivals`, in their order: seconds,
    deadline, tokens, expected tokens and prefill seconds of each request, and whether its deadline bounds the first token; `horizon_s`:
    those until then count. `seat_s`: what a sequence adds to a step; `thinned`: requests that each of these stands for; `seats_max`: those
    that have room in KV."""

    running: list[tuple[float, float]]
    arrivals: list[tuple[float, float, float, float, float, bool]]
    horizon_s: float
    base_s: float
    seat_s: float
    thinned: float
    seats_max: float

    def value(self, size: int) -> tuple[float, float]:
        """The share of requests that end in time if at most `size` run at once, and a little for the throughput; and the most that run at
        once. First tokens do not wait for seats that the size keeps free; requests that are expected to be late wait for all
        others."""
        limit = max(1.0, min(size, self.seats_max) / self.thinned)
        most = max(1.0, self.seats_max / self.thinned)
        arrivals, base_s, seat_s = self.arrivals, self.base_s, self.seat_s
        seats, waiting, late = self.running.copy(), list[tuple[float, int]](), list[int]()
        now_s = clock = 0.0
        come, total, in_time, peak = 0, len(arrivals), 0, 0
        counted = bisect_left(arrivals, (self.horizon_s,))
        requests = unsettled = counted + sum(due_s != NOT_COUNTED for _, due_s in seats)
        while unsettled:
            while come < total and arrivals[come][0] <= now_s:
                heappush(waiting, (arrivals[come][1], come))
                come += 1
            while waiting:
                due_s, index = waiting[0]
                _, _, tokens, expected, prefill_s, first_token = arrivals[index]
                token_s = base_s + seat_s * (len(seats) + 1)
                if now_s + prefill_s + (token_s if first_token else expected * token_s) > due_s:
                    late.append(index)
                    unsettled -= index < counted
                elif len(seats) < limit or (first_token and len(seats) < most):
                    if first_token and index < counted:
                        in_time += 1
                        unsettled -= 1
                    heappush(seats, (clock + tokens, NOT_COUNTED if first_token or index >= counted else due_s - prefill_s))
                else:
                    break
                heappop(waiting)
            while late and len(seats) < limit:
                heappush(seats, (clock + arrivals[late.pop()][2], NOT_COUNTED))
            if not seats:
                if come == total:
                    break
                now_s = arrivals[come][0]
                continue
            peak = max(peak, len(seats))
            token_s = base_s + seat_s * len(seats)
            end_s = now_s + (seats[0][0] - clock) * token_s
            if come < total and arrivals[come][0] < end_s:
                clock += (arrivals[come][0] - now_s) / token_s
                now_s = arrivals[come][0]
            else:
                clock, due_s = heappop(seats)
                now_s = end_s
                if due_s != NOT_COUNTED:
                    in_time += now_s <= due_s
                    unsettled -= 1
        throughput = (base_s / most + seat_s) / (base_s / max(1, min(limit, peak)) + seat_s)
        return in_time / max(1, requests) + THROUGHPUT_SHARE * throughput, peak * self.thinned


def _course(
    choice: int, hardware: HardwareProfile, demands: Sequence[ClassDemand], batch_max: int, slowdown: float, share: float
) -> _Course:
    chance = np.random.Generator(np.random.PCG64(choice))
    counts = [each.requests for each in demands]
    weights = counts if sum(counts) else [1] * len(demands)
    outputs = [each.outputs.output_tokens.mean for each in demands]
    # A request takes a seat for as many steps as it makes tokens.
    seats = [weight * output for weight, output in zip(weights, outputs, strict=True)]
    each_s = [_sequence_s(hardware, each.prompt_tokens, output) for each, output in zip(demands, outputs, strict=True)]
    # Agents reserve KV for the whole of an output.
    held = [each.prompt_tokens + output for each, output in zip(demands, outputs, strict=True)]
    seat_s = slowdown * _mean(each_s, seats)
    base_s = slowdown * hardware.decode_step_s(0.0, 0.0)
    seats_max = max(1.0, min(batch_max, hardware.kv_capacity_tokens / _mean(held, seats)))
    horizon_s = HORIZON_OUTPUTS * _mean(outputs, weights) * (base_s + seat_s * seats_max)
    drawn_s = 2.0 * horizon_s / share
    thinned = max(1.0, (sum(counts) + drawn_s * sum(each.arrivals_per_s for each in demands)) / REQUESTS_MAX)
    running: list[tuple[float, float]] = []
    arrivals: list[tuple[float, float, float, float, float, bool]] = []
    for demand in demands:
        lengths = _lengths(demand.outputs)
        first_token, expected = demand.first_token, float(lengths[QUANTILES // 2])
        prefill_s = slowdown * hardware.prefill_work_s(demand.prompt_tokens, demand.prompt_tokens * demand.prompt_tokens)
        produced, due_s = np.array(demand.running, dtype=np.float64).reshape(-1, 2)[chance.random(len(demand.running)) * thinned < 1.0].T
        # Of the lengths beyond what it has produced; a run that has outlived them makes half as much again.
        above = np.searchsorted(lengths, produced, side="right")
        of = (above + chance.random(len(above)) * (QUANTILES - above)).astype(np.int64)
        left = np.where(above < QUANTILES, lengths[np.minimum(of, QUANTILES - 1)] - produced, 0.5 * produced)
        running += zip(left.tolist(), [NOT_COUNTED] * len(left) if first_token else due_s.tolist(), strict=True)
        first_s, waiting = np.array(demand.waiting, dtype=np.float64).reshape(-1, 2).T
        waiting_s = np.repeat(first_s, chance.binomial(waiting.astype(np.int64), 1.0 / thinned))
        at_s = 2.0 * horizon_s * chance.random(chance.poisson(demand.arrivals_per_s * drawn_s / thinned))
        tokens = lengths[(QUANTILES * chance.random(len(waiting_s) + len(at_s))).astype(np.int64)]
        starts, dues = np.append(np.zeros(len(waiting_s)), at_s), np.append(waiting_s, at_s + demand.slo_s)
        arrivals += (
            (*each, expected, prefill_s, first_token) for each in zip(starts.tolist(), dues.tolist(), tokens.tolist(), strict=True)
        )
    heapify(running)
    arrivals.sort()
    return _Course(running, arrivals, horizon_s, base_s, seat_s * thinned, thinned, seats_max)


@lru_cache(maxsize=256)
def _lengths(outputs: LengthCurve) -> FloatArray:
    """Equally likely output lengths, ascending."""
    return np.array([outputs.quantile((number + 0.5) / QUANTILES) for number in range(QUANTILES)])


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def step_s(hardware: HardwareProfile, sequences: float, prompt_tokens: float, output_tokens: float) -> float:
    """Seconds of a step of so many sequences, the prefills of those that take their places shared among the steps: `a + n (b + c context)`
    of the module."""
    return hardware.decode_step_s(0.0, 0.0) + sequences * _sequence_s(hardware, prompt_tokens, output_tokens)


def _sequence_s(hardware: HardwareProfile, prompt_tokens: float, output_tokens: float) -> float:
    """Seconds that a sequence adds to each step. It holds its prompt and half of its output on average."""
    decode_s = hardware.decode_step_s(1.0, prompt_tokens + 0.5 * output_tokens) - hardware.decode_step_s(0.0, 0.0)
    return decode_s + hardware.prefill_work_s(prompt_tokens, prompt_tokens * prompt_tokens) / output_tokens
