"""How many requests an engine runs at once: the batch as a decision (design, "One model of an engine").

A step takes `a + n (b + c context)` and the prefills of those that join, so a larger batch serves more requests a second and makes each of
them slower. Of the sizes that the engine allows, the one is chosen that serves most requests a second in time:

    max over n of  sum over classes k of  served_k(n) F_k((SLO_SHARE x SLO_k - P_k) / d(n)),   sum of served_k(n) <= n / (O d(n))

with F_k the distribution of the class's outputs, P_k its prefill and d(n) the step. The most urgent classes are served first. Whole SLOs
count, not slack: a limit that falls as requests wait would make them wait longer. Requests that are late already count for throughput
alone, so where nobody is at risk, or all are late and no more come, the largest batch is chosen.

Postponed requests are served in the end, and become as urgent as the rest. So for each SLO the size keeps up with the lasting arrivals of
all classes with no longer SLO, if any size can (the processor demand criterion: Baruah, Rosier, Howell, 1990).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from qlm_core.length_curve import LengthCurve
from qlm_core.normal_arrays import Floats
from qlm_core.profile import HardwareProfile

SLO_SHARE = 0.9
"""Of the SLO, the time that serving may take; the rest is for waiting, and for a step that is slower than predicted."""

SIZES = 48
"""Sizes that are compared, evenly spaced by ratio: they differ by 12% at the most."""

ENOUGH = 0.98
"""The largest size with so much of the best one's value is chosen: near the optimum a little less in time buys much throughput, which a
burst needs."""

THROUGHPUT_SHARE = 1e-3
"""Weight of a request served at all beside one served in time: it decides where the latter are equal."""

POSTPONED_FROM = 2.0
"""A class whose SLO is so many times the time of an output in the largest batch can be postponed: its waiting requests count, so that half
of their SLO is left, and its arrivals do not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassDemand:
    """Requests of one model and SLO class on an instance. `slo_s` > 0: infinite for those without a deadline; `first_token`: it bounds the
    first token. `arrivals_per_s`: that come to the instance; `waiting`: now, that can still be in time; `running`: now.
    `prompt_tokens`: of one, on average."""

    slo_s: float
    first_token: bool
    arrivals_per_s: float
    waiting: float
    running: float
    prompt_tokens: float
    outputs: LengthCurve

    def rate_per_s(self, postponed_from_s: float) -> float:
        """Requests that have to start each second so that all are in time."""
        if self.slo_s > postponed_from_s:
            return 2.0 * self.waiting / self.slo_s
        return self.arrivals_per_s + self.waiting / self.slo_s


@lru_cache(maxsize=64)
def sizes(batch_max: int) -> tuple[int, ...]:
    """Batch sizes that are compared, ascending, the last one `batch_max` >= 1."""
    return tuple(sorted({round(size) for size in np.geomspace(1.0, batch_max, SIZES)} | {batch_max}))


def choose_batch(
    hardware: HardwareProfile,
    demands: Sequence[ClassDemand],
    batch_max: int,
    *,
    slowdown: float = 1.0,
    share: float = 1.0,
    sustained_per_s: Sequence[float] = (),
) -> int:
    """The most requests to run at once, at most `batch_max`. `slowdown`: measured steps over those of the profile; `share`: of the engine's
    time, that it has for these classes beside other models that wait; `sustained_per_s`: for each SLO the arrivals over its time of the
    classes that have no more. Costs O(classes)."""
    if all(each.first_token or each.slo_s == np.inf for each in demands):
        return batch_max
    grid = np.array(sizes(batch_max), dtype=np.float64)
    present = np.array([each.running + each.waiting for each in demands])
    mix = present / present.sum() if present.any() else np.full(len(demands), 1.0 / len(demands))
    step_s, prefill_s, output = _steps(hardware, demands, mix, grid)
    step_s *= slowdown
    postponed_from_s = POSTPONED_FROM * output * float(step_s[-1])
    capacity = share * grid / (output * step_s)
    left, value = capacity.copy(), THROUGHPUT_SHARE * capacity
    for demand, own_s in sorted(zip(demands, prefill_s, strict=True), key=lambda each: each[0].slo_s):
        served = np.minimum(demand.rate_per_s(postponed_from_s), left)
        left -= served
        value += served * _in_time(demand, slowdown * own_s, step_s)
    floor_per_s = max((rate for rate in sustained_per_s if rate <= capacity.max()), default=0.0)
    value[capacity < floor_per_s] = 0.0
    return int(grid[np.flatnonzero(value >= ENOUGH * value.max())[-1]])


def step_s(hardware: HardwareProfile, sequences: float, prompt_tokens: float, output_tokens: float) -> float:
    """Seconds of a step of so many sequences, the prefills of those that take their places shared among the steps: d(n) of the module."""
    return hardware.decode_step_s(0.0, 0.0) + sequences * _sequence_s(hardware, prompt_tokens, output_tokens)


def _sequence_s(hardware: HardwareProfile, prompt_tokens: float, output_tokens: float) -> float:
    """What a sequence adds to each step. It holds its prompt and half of its output on average."""
    decode_s = hardware.decode_step_s(1.0, prompt_tokens + 0.5 * output_tokens) - hardware.decode_step_s(0.0, 0.0)
    return decode_s + hardware.prefill_work_s(prompt_tokens, prompt_tokens * prompt_tokens) / output_tokens


def _steps(hardware: HardwareProfile, demands: Sequence[ClassDemand], share: Floats, grid: Floats) -> tuple[Floats, list[float], float]:
    """Seconds of a step of each size, seconds of a prefill of each class, and the mean output of a request. `share` [classes]: of the
    requests."""
    outputs = np.array([each.outputs.output_tokens.mean for each in demands])
    prompts = [each.prompt_tokens for each in demands]
    # A request takes a seat for as many steps as it makes tokens.
    seats = share * outputs
    each_s = np.array([_sequence_s(hardware, prompt, output) for prompt, output in zip(prompts, outputs.tolist(), strict=True)])
    sequence_s = float(seats @ each_s) / float(seats.sum())
    prefill_s = [hardware.prefill_work_s(prompt, prompt * prompt) for prompt in prompts]
    return hardware.decode_step_s(0.0, 0.0) + grid * sequence_s, prefill_s, float(seats.sum())


def _in_time(demand: ClassDemand, prefill_s: float, step_s: Floats) -> Floats:
    """The share of a class that ends within its SLO, by the size of the batch."""
    left_s = SLO_SHARE * demand.slo_s - prefill_s
    if demand.first_token or demand.slo_s == np.inf:
        return np.where(step_s < left_s, 1.0, 0.0)
    return 1.0 - demand.outputs.survival_of(left_s / step_s)
