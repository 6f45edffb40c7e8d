"""How good predictions were: shares of the variance explained, errors by depth, coverage of quantiles. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DECILES = 10
LEVELS = (0.5, 0.9, 0.99)
"""Quantiles that are judged."""


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """Predictions at arrival and their outcomes, one place for each request, in the order of arrival. Seconds from the arrival; `depth`:
    requests ahead; `model`: its number; `wait_s`, `completion_s`: the medians that were predicted, `*_p90_s`, `*_p99_s` the quantiles."""

    arrival_s: Floats
    model: NDArray[np.int64]
    depth: Floats
    wait_s: Floats
    wait_p90_s: Floats
    wait_p99_s: Floats
    actual_wait_s: Floats
    completion_s: Floats
    completion_p90_s: Floats
    completion_p99_s: Floats
    actual_completion_s: Floats

    def __len__(self) -> int:
        return len(self.depth)

    def where(self, chosen: NDArray[np.bool_]) -> Judged:
        """Only some of them."""
        return Judged(**{name: getattr(self, name)[chosen] for name in self.__slots__})

    def wait_within(self, level: float) -> NDArray[np.bool_]:
        """Whether the wait ended by the quantile of one of LEVELS."""
        return self.actual_wait_s <= {0.5: self.wait_s, 0.9: self.wait_p90_s, 0.99: self.wait_p99_s}[level]

    def completion_within(self, level: float) -> NDArray[np.bool_]:
        """The same of the completion."""
        return self.actual_completion_s <= {0.5: self.completion_s, 0.9: self.completion_p90_s, 0.99: self.completion_p99_s}[level]


def r2(predicted: Floats, actual: Floats) -> float:
    """1 - (sum of squared errors) / (sum of squares around the mean); 0 where all that happened took equally long."""
    around = float(((actual - actual.mean()) ** 2).sum())
    return 1.0 - float(((predicted - actual) ** 2).sum()) / around if around > 0.0 else 0.0


def by_depth(depth: Floats) -> list[NDArray[np.int64]]:
    """Places in ten parts of equal size, by depth; equal depths stay in the order of arrival."""
    return np.array_split(np.argsort(depth, kind="stable"), DECILES)


def coverage(within: NDArray[np.bool_]) -> float:
    """Percent."""
    return 100.0 * float(within.mean())
