"""How much longer loads of models and moves of KV take on an instance than the profile of its GPUs and model says.

Loads are few, and each may be far off: the files of a model are in the page cache or not, another load has the disk, an engine starts a
process or wakes one. The estimate is the mean of the logarithms of measured over profiled times, in which old ones fade and none counts
as more than FAR from the mean before it; it begins with the pair's own figure, which weighs as much as PRIOR_OPERATIONS.

A warming measures a load from disk: it is compared with one after the time from host memory is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qlm_core.profiles.hardware_profile import (
    ORIGIN_FACTS,
    ORIGIN_MEASURED,
    ORIGIN_SHIPPED,
    TIMED_OPERATIONS,
    HardwareProfile,
    OperationSlowdown,
)
from qlm_core.profiles.importable_profiles import SLOWDOWN_MAX
from qlm_estimator.events import OperationKind, ReportedOperation

PRIOR_OPERATIONS: Mapping[str, float] = {ORIGIN_SHIPPED: 1.0, ORIGIN_MEASURED: 2.0, ORIGIN_FACTS: 0.5}
"""Operations that the pair's own figure weighs as much as."""
MEMORY = 8.0
"""Operations of a kind after which an old one weighs 1 / e."""
FAR = math.log(2.0)
SPREAD = 0.35
"""Deviation of the logarithm of operations of one kind: a factor of 1.4."""
RESOLUTION_S = 0.002
"""Resolution of a measured time: the delay that the measuring process adds. Operations as short as this show little."""
TOOK_MAX_S = 86_400.0
"""No operation takes longer."""
_LOG_MAX = math.log(SLOWDOWN_MAX)


@dataclass(slots=True)
class OperationFactor:
    """One kind of operation of a model on an instance: faded sums of weights and of weighted logarithms, over the prior's as well.
    `samples`: operations seen."""

    prior: float
    weight: float
    total: float = 0.0
    samples: int = 0

    @property
    def level(self) -> float:
        return min(_LOG_MAX, max(-_LOG_MAX, self.total / self.weight))

    @property
    def slowdown(self) -> OperationSlowdown:
        return OperationSlowdown(slowdown=math.exp(self.level), samples=self.samples, prior_share=self.prior / self.weight)

    def restore(self, published: OperationSlowdown) -> None:
        """Goes on from what was published; a figure without samples changes nothing."""
        if published.samples:
            self.samples = published.samples
            self.weight = min(self.prior / max(published.prior_share, 1e-6), MEMORY + self.prior)
            self.prior = published.prior_share * self.weight
            self.total = self.weight * math.log(published.slowdown)

    def add(self, error: float, weight: float) -> None:
        kept = math.exp(-weight / MEMORY)
        seen = min(max(error, self.level - FAR), self.level + FAR)
        self.prior, self.weight, self.total = kept * self.prior, kept * self.weight + weight, kept * self.total + weight * seen
        self.samples += 1


def operation_factors(base: HardwareProfile) -> dict[str, OperationFactor]:
    """Those of TIMED_OPERATIONS on an instance of a pair, before any was seen."""
    prior = PRIOR_OPERATIONS[base.origin]
    return {name: OperationFactor(prior, prior) for name in TIMED_OPERATIONS}


def learn_operation(factors: Mapping[str, OperationFactor], base: HardwareProfile, operation: ReportedOperation, time_scale: float) -> bool:
    """Holds one operation against the row of its pair; False if it is left out: no finite time above 0, or nothing is profiled."""
    if not 0.0 < operation.took_s <= TOOK_MAX_S:  # False for NaN
        return False
    name, measured_s = "swap_cold", operation.took_s * time_scale
    match operation.kind:
        case OperationKind.SWAPPED_WARM:
            name, profiled_s = "swap_warm", base.swap_s(warm=True)
        case OperationKind.SWAPPED_COLD:
            profiled_s = base.swap_s(warm=False)
        case OperationKind.WARMED:
            profiled_s = base.swap_s(warm=False)
            measured_s += math.exp(factors["swap_warm"].level) * base.swap_s(warm=True)
        case OperationKind.KV_MOVED:
            name, profiled_s = "kv_swap", base.kv_swap_s(operation.tokens, operation.requests)
    if not (math.isfinite(profiled_s) and SPREAD * profiled_s > 0.0):
        return False
    blur = RESOLUTION_S * time_scale / (SPREAD * profiled_s)
    ratio = min(SLOWDOWN_MAX, max(1.0 / SLOWDOWN_MAX, measured_s / profiled_s))
    factors[name].add(math.log(ratio), 1.0 / (1.0 + blur * blur))
    return True
