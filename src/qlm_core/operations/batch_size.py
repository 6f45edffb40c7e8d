"""How many requests an engine runs at once: the batch as a decision (design, "One model of an engine").

A step takes `a + n (b + c context)` and the prefills of new requests, so a larger batch serves more requests a second, makes each of them
slower, and stops all while its new seats are prefilled. Sizes are compared by rollouts, as in model predictive control: from the requests
that run and wait, the engine's next `HORIZON_OUTPUTS` outputs are simulated with arrivals at their rates and output lengths of their
classes, the earliest deadline first, and the requests that end in time are counted. So waits, prefills, postponed requests and lasting
arrivals count as well as slow steps do. Of requests that are due after the simulated time as many have their turn in it as if all were
served evenly until their deadlines; those for which a size leaves no room, and the largest does, count as late, since simulated arrivals
end and a queue would cost nothing after them.
Beside other models that wait for the engine, requests that are due within that time share the value: these by what ends in time, the others
by the throughput, since what is done sooner leaves the engine to them.

Each choice draws one course of events and compares all sizes on it, as long as a request's end in time depends on them. Their values are
averaged over about `CHOICES_KEPT` choices, and the best is the size: one course says little, and a size that moves with each of them serves
nobody.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

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
"""Loss of the share in time: smaller sizes than one that loses so much on a course are not compared on it."""

THROUGHPUT_SHARE = 1e-3
"""Least weight of the throughput, relative to the largest, beside the share of requests in time: it decides where the latter are equal."""

NOT_COUNTED = -math.inf
"""Deadline of a request of a course that takes a seat and does not count."""

MISSED = -sys.float_info.max
"""Deadline of a running request that counts and cannot keep its own at any size."""

ROUNDING = 1e-9
"""Relative margin of bounds on simulated times, whose rounding errors add up to less."""

QUANTILES = 64
"""Output lengths are drawn from so many equally likely ones of the class."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassDemand:
    """Requests of one model and SLO class on an instance. `slo_s` > 0: infinite for those without a deadline; `first_token`: it bounds the
    first token. `arrivals_per_s`: at the instance. `running`: produced tokens and seconds to the deadline of each that runs; `prefilling`:
    how many of these await their first token; `waiting`: seconds to the first deadline and number of requests of each group.
    `prompt_tokens`: of one, on average, of which `uncached_share` is computed."""

    slo_s: float
    first_token: bool
    arrivals_per_s: float
    running: Sequence[tuple[float, float]]
    waiting: Sequence[tuple[float, int]]
    prompt_tokens: float
    outputs: LengthCurve
    uncached_share: float = 1.0
    prefilling: int = 0

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

    def choose(
        self, hardware: HardwareProfile, demands: Sequence[ClassDemand], *, slowdown: float = 1.0, others: Sequence[tuple[float, int]] = ()
    ) -> int:
        """Chooses again. `slowdown`: measured steps over those of the profile; `others`: groups of other models that wait, as
        those of `ClassDemand.waiting`. Costs O(REQUESTS_MAX)."""
        if all(each.first_token or each.slo_s == math.inf for each in demands):
            self.size, self._values = self._sizes[-1], []
            return self.size
        self._choices += 1
        course = _course(self._choices, hardware, demands, self._sizes[-1], slowdown, others)
        values = course.values(self._sizes)
        weight = 1.0 / min(self._choices, CHOICES_KEPT)
        kept = self._values or values
        self._values = [old + weight * (new - old) for old, new in zip(kept, values, strict=True)]
        self.size = max(zip(self._values, self._sizes, strict=True))[1]
        return self.size


@lru_cache(maxsize=64)
def sizes(batch_max: int) -> tuple[int, ...]:
    """Batch sizes that are compared, ascending, the last one `batch_max` >= 1."""
    steps = math.floor(SIZES_PER_DOUBLING * math.log2(batch_max))
    return tuple(sorted({round(batch_max * 2 ** (-step / SIZES_PER_DOUBLING)) for step in range(steps + 1)} | {1}))


_Arrival = tuple[float, int, float, float, float, bool, float]
"""Deadline in seconds, place in the order of starts, output tokens, tokens until what the deadline bounds, prefill seconds, whether that is
the first token, deadline again or `NOT_COUNTED`."""


@dataclass(frozen=True, eq=False)
class _Course:
    """The events of a course. `running`: tokens to the end and seconds to the deadline of each, `NOT_COUNTED` for first tokens. `arrivals`,
    those that wait included: seconds, deadline, output tokens, expected tokens, prefill seconds, whether the deadline bounds the first
    token; those before `horizon_s` count. `decode_s`: what a sequence adds to a step; `seat_s`: the same with its share of the prefills;
    `prefilling_s`: prefills of running requests; `thinned`: requests that each of these stands for; `seats_max`: those that have room in
    KV; `share`: of the engine's time, that these requests have beside other models that wait. `due`: requests that run or are due before
    the course ends; `later`: of the others, those whose turn comes until then; `outputs_s`: seconds of the course over the tokens of an
    output."""

    running: FloatArray
    arrivals: FloatArray
    horizon_s: float
    base_s: float
    decode_s: float
    seat_s: float
    prefilling_s: float
    thinned: float
    seats_max: float
    share: float
    due: float
    later: float
    outputs_s: float

    def values(self, batch_sizes: Sequence[int]) -> list[float]:
        """The value of each of these ascending sizes: the share of requests that end in time if at most so many run at once, and the
        throughput. Sizes above the most that run make no difference; below one that is much worse than the best, all count as that."""
        most = max(1.0, self.seats_max / self.thinned)
        values: list[float] = []
        value, best, peak, simulated, in_time = 0.0, 0.0, math.inf, 0, 0
        for size in reversed(batch_sizes):
            if size < peak * self.thinned and value > best - MUCH_WORSE:
                limit = max(1.0, min(size, self.seats_max) / self.thinned)
                if math.ceil(limit) != simulated:
                    simulated = math.ceil(limit)
                    in_time, peak = self._simulate(simulated, math.ceil(most))
                throughput = (self.base_s / most + self.seat_s) / (self.base_s / max(1, min(limit, peak)) + self.seat_s)
                kept = in_time - self.postponed(limit, most)
                value = self.share * kept / max(1, len(self._slacks_s)) + max(THROUGHPUT_SHARE, 1.0 - self.share) * throughput
                best = max(best, value)
            values.append(value)
        return values[::-1]

    def postponed(self, limit: float, most: float) -> float:
        """Requests of `later` that have their turn if `most` run at once, and not if `limit` do."""
        room = (seats * self.outputs_s / (self.base_s + self.seat_s * seats) - self.due for seats in (most, limit))
        at_most, found = (min(self.later, max(0.0, each)) for each in room)
        return at_most - found

    def _simulate(self, limit: int, most: int) -> tuple[int, int]:
        """How many requests end in time if at most `limit` run at once; and the most that run at once, or any number >= `limit` below it.
        First tokens do not wait for seats that the limit keeps free, of `most`; requests that are expected to be late wait for all
        others."""
        base_s, decode_s, slacks_s = self.base_s, self.decode_s, self._slacks_s
        waiting_now, last_s, tokens_sum, tokens_most, prefills_s = self._work
        peak = self.running.shape[1]
        # While requests wait, `limit` or more run. So all have started when those have made all tokens after the last arrival.
        started_s = last_s + prefills_s + tokens_sum * (base_s / limit + decode_s)
        sure_s = (1.0 + ROUNDING) * (started_s + tokens_most * (base_s + decode_s * (max(peak, most) + 1)))
        unsettled = len(slacks_s)
        undecided = bisect_left(slacks_s, sure_s)
        in_time = unsettled - undecided
        undecided -= bisect_right(slacks_s, MISSED)
        if not unsettled:
            return 0, 0
        if not undecided and peak + waiting_now >= limit:
            return in_time, max(peak, limit)
        starts_s, arrivals, running = self._events
        seats, waiting, late = running.copy(), arrivals[:waiting_now], list[tuple[float, float]]()
        arrived, next_s, now_s, clock = waiting_now, starts_s[waiting_now], self.prefilling_s, 0.0
        while unsettled:
            sequences = len(seats)
            while waiting or next_s <= now_s:
                if next_s <= now_s:
                    insort(waiting, arrivals[arrived])
                    arrived += 1
                    next_s = starts_s[arrived]
                    continue
                due_s, _, tokens, expected, prefill_s, first_token, slack_s = waiting[0]
                if now_s + prefill_s + expected * (base_s + decode_s * (sequences + 1)) > due_s:
                    late.append((tokens, prefill_s))
                    if slack_s != NOT_COUNTED:
                        unsettled -= 1
                        undecided -= 1
                elif sequences < limit or (first_token and sequences < most):
                    now_s += prefill_s
                    if first_token and slack_s != NOT_COUNTED:
                        unsettled -= 1
                        in_time += slack_s < sure_s
                        undecided -= slack_s < sure_s
                        slack_s = NOT_COUNTED
                    insort(seats, (clock + tokens, slack_s))
                    sequences += 1
                else:
                    break
                del waiting[0]
            if late and sequences < limit:
                tokens, prefill_s = late.pop()
                now_s += prefill_s
                insort(seats, (clock + tokens, NOT_COUNTED))
                continue
            if sequences > peak:
                peak = sequences
            if not undecided and peak >= limit:
                break
            if not sequences:
                if next_s == math.inf:
                    break
                now_s = next_s
                continue
            token_s = base_s + decode_s * sequences
            end_s = now_s + (seats[0][0] - clock) * token_s
            if next_s < end_s:
                clock += (next_s - now_s) / token_s
                now_s = next_s
            else:
                clock, slack_s = seats.pop(0)
                now_s = end_s
                if slack_s != NOT_COUNTED:
                    unsettled -= 1
                    if MISSED < slack_s < sure_s:
                        in_time += now_s <= slack_s
                        undecided -= 1
        return in_time, peak

    @cached_property
    def _slacks_s(self) -> list[float]:
        """Seconds to the deadline of those that count, ascending."""
        running_s, arrivals_s = self.running[1], self.arrivals[1][self.arrivals[0] < self.horizon_s]
        found: list[float] = np.concatenate([running_s[running_s != NOT_COUNTED], arrivals_s]).tolist()
        return sorted(found)

    @cached_property
    def _work(self) -> tuple[int, float, float, float, float]:
        """Requests that wait, seconds to the last start, tokens of all requests, most tokens of one, made or expected, and seconds of all
        prefills."""
        left, starts_s = self.running[0], self.arrivals[0]
        most = max(left.max(initial=0.0), self.arrivals[2:4].max(initial=0.0))
        tokens = float(left.sum() + self.arrivals[2].sum())
        prefills_s = self.prefilling_s + float(self.arrivals[4].sum())
        return int(np.count_nonzero(starts_s == 0.0)), float(starts_s.max(initial=0.0)), tokens, float(most), prefills_s

    @cached_property
    def _events(self) -> tuple[list[float], list[_Arrival], list[tuple[float, float]]]:
        """Starts in their order and infinity, the arrivals, and the running requests, the first to end first."""
        rows = sorted(zip(*self.arrivals.tolist(), strict=True))
        arrivals: list[_Arrival] = []
        for index, (start_s, due_s, tokens, expected, prefill_s, first_token) in enumerate(rows):
            slack_s = due_s if start_s < self.horizon_s else NOT_COUNTED
            arrivals.append((due_s, index, tokens, 1.0 if first_token else expected, prefill_s, first_token > 0.0, slack_s))
        return [*(row[0] for row in rows), math.inf], arrivals, sorted(zip(*self.running.tolist(), strict=True))


def _course(
    choice: int,
    hardware: HardwareProfile,
    demands: Sequence[ClassDemand],
    batch_max: int,
    slowdown: float,
    others: Sequence[tuple[float, int]],
) -> _Course:
    chance = np.random.Generator(np.random.PCG64(choice))
    counts = [each.requests for each in demands]
    weights = counts if sum(counts) else [1] * len(demands)
    outputs = [each.outputs.output_tokens.mean for each in demands]
    # A request takes a seat for as many steps as it makes tokens.
    seats = [weight * output for weight, output in zip(weights, outputs, strict=True)]
    decodes_s = [_decode_s(hardware, each.prompt_tokens, output) for each, output in zip(demands, outputs, strict=True)]
    works_s = [slowdown * _prefill_s(hardware, each.prompt_tokens, each.uncached_share) for each in demands]
    # Agents reserve KV for the whole of an output.
    held = [each.prompt_tokens + output for each, output in zip(demands, outputs, strict=True)]
    decode_s = slowdown * _mean(decodes_s, seats)
    seat_s = decode_s + _mean(works_s, weights) / _mean(outputs, weights)
    base_s = slowdown * hardware.decode_step_s(0.0, 0.0)
    seats_max = max(1.0, min(batch_max, hardware.kv_capacity_tokens / _mean(held, seats)))
    horizon_s = HORIZON_OUTPUTS * _mean(outputs, weights) * (base_s + seat_s * seats_max)
    # Requests of other models that are due later than the course ends need no engine in it.
    end_s = 2.0 * horizon_s
    due = max(1, sum(len(each.running) + _due(each.waiting, end_s) for each in demands))
    share = due / (due + _due(others, end_s))
    drawn_s = end_s / share
    thinned = max(1.0, (sum(counts) + drawn_s * sum(each.arrivals_per_s for each in demands)) / REQUESTS_MAX)
    first_s, numbers = _pairs(each.waiting for each in demands)
    waiting = numbers.astype(np.int64)
    parts = np.cumsum([0, *(len(each.waiting) for each in demands)]).tolist()
    kept, places, levels = [], [], []
    starts_s, dues_s = list[FloatArray](), list[FloatArray]()
    for each, begin, end in zip(demands, parts, parts[1:], strict=False):
        kept.append(chance.random(len(each.running)) * thinned < 1.0)
        places.append(chance.random(np.count_nonzero(kept[-1])))
        waiting_s = np.repeat(first_s[begin:end], chance.binomial(waiting[begin:end], 1.0 / thinned))
        at_s = end_s * chance.random(chance.poisson(each.arrivals_per_s * drawn_s / thinned))
        starts_s += (np.zeros(len(waiting_s)), at_s)
        dues_s += (waiting_s, at_s + each.slo_s)
        levels.append(chance.random(len(waiting_s) + len(at_s)))
    lengths = np.array([_lengths(each.outputs) for each in demands])
    first_token = np.array([each.first_token for each in demands])
    of = np.repeat(np.arange(len(demands)), [len(each) for each in places])
    produced, due_s = _pairs(each.running for each in demands)[:, np.concatenate(kept)]
    # Lengths beyond the produced tokens; a run that has outlived them makes half as much again.
    above = np.count_nonzero(lengths[of] <= produced[:, None], axis=1)
    drawn = (above + np.concatenate(places) * (QUANTILES - above)).astype(np.int64)
    left = np.where(above < QUANTILES, lengths[of, np.minimum(drawn, QUANTILES - 1)] - produced, 0.5 * produced)
    due_s = np.where(due_s < (1.0 - ROUNDING) * (base_s + decode_s * thinned) * left, MISSED, due_s)
    running = np.array([left, np.where(first_token[of], NOT_COUNTED, due_s)])
    of = np.repeat(np.arange(len(demands)), [len(each) for each in levels])
    tokens = lengths[of, (QUANTILES * np.concatenate(levels)).astype(np.int64)]
    facts = np.array([lengths[:, QUANTILES // 2], thinned * np.array(works_s), first_token])
    arrivals = np.concatenate([[np.concatenate(starts_s), np.concatenate(dues_s), tokens], facts[:, of]])
    arriving = drawn_s * sum(each.arrivals_per_s for each in demands if each.slo_s <= end_s)
    turns = sum(count * end_s / due_s for each in demands for due_s, count in each.waiting if due_s > end_s)
    return _Course(
        running,
        arrivals,
        horizon_s,
        base_s,
        decode_s * thinned,
        seat_s * thinned,
        sum(each.prefilling * work_s for each, work_s in zip(demands, works_s, strict=True)),
        thinned,
        seats_max,
        share,
        due=(due + arriving) / thinned,
        later=turns / thinned,
        outputs_s=end_s / _mean(outputs, weights),
    )


@lru_cache(maxsize=256)
def _lengths(outputs: LengthCurve) -> FloatArray:
    """Equally likely output lengths, ascending."""
    return outputs.quantile_of((np.arange(QUANTILES) + 0.5) / QUANTILES)


def _pairs(parts: Iterable[Iterable[tuple[float, float]]]) -> FloatArray:
    """The first and the second numbers of all pairs [2, pairs]."""
    return np.fromiter(chain.from_iterable(chain.from_iterable(parts)), np.float64).reshape(-1, 2).T


def _due(groups: Iterable[tuple[float, int]], until_s: float) -> int:
    return sum(count for first_s, count in groups if first_s <= until_s)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def step_s(hardware: HardwareProfile, sequences: float, prompt_tokens: float, output_tokens: float, uncached_share: float = 1.0) -> float:
    """Seconds of a step of so many sequences, the prefills of those that take their places shared among the steps: `a + n (b + c context)`
    of the module."""
    sequence_s = _decode_s(hardware, prompt_tokens, output_tokens) + _prefill_s(hardware, prompt_tokens, uncached_share) / output_tokens
    return hardware.decode_step_s(0.0, 0.0) + sequences * sequence_s


def _decode_s(hardware: HardwareProfile, prompt_tokens: float, output_tokens: float) -> float:
    """Seconds that a sequence adds to each step. It holds its prompt and half of its output on average."""
    return hardware.decode_step_s(1.0, prompt_tokens + 0.5 * output_tokens) - hardware.decode_step_s(0.0, 0.0)


def _prefill_s(hardware: HardwareProfile, prompt_tokens: float, uncached_share: float) -> float:
    return hardware.prefill_work_s(prompt_tokens, prompt_tokens * prompt_tokens, uncached_share)
