"""How much longer one kind of operation (a load, a move of KV) takes on an instance than its hardware profile says."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSlowdown:
    """`slowdown`: measured over profiled durations, > 0. `samples`: operations behind it; `prior_share`: how much of it is still the
    profile's, 1 for all. `drifting_since_s`: seconds of the queue's clock from when it has not taken as long as before, 0 where it does."""

    slowdown: float = 1.0
    samples: int = 0
    prior_share: float = 1.0
    drifting_since_s: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slowdown) and self.slowdown > 0.0):
            raise ValueError(f"the slowdown of an operation is finite and > 0, got {self.slowdown}")
        if not (math.isfinite(self.drifting_since_s) and self.drifting_since_s >= 0.0) or self.samples < 0:
            raise ValueError(f"an operation has samples >= 0 and a finite time >= 0, got {self.samples} and {self.drifting_since_s}")
        if not 0.0 <= self.prior_share <= 1.0:
            raise ValueError(f"the prior's share of an operation is from 0 to 1, got {self.prior_share}")


AS_PROFILED = OperationSlowdown()
