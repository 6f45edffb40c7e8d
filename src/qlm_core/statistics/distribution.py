"""The one distribution type of QLM: a normal by its mean and variance (QLM section 6, equation 3).

Sums of independent quantities stay normal, and many requests are served before most others, so the central limit works for us.
Where a bound matters (a wait is not negative, an output ends at its limit) the clipped variable is replaced by the normal of the same mean
and variance. A variance of zero is a known quantity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from qlm_core.statistics.normal_arrays import FAR_DEVIATIONS, floored

_INVERSE_SQRT_2 = 1.0 / math.sqrt(2.0)
_STANDARD = NormalDist()


@dataclass(frozen=True, slots=True)
class Normal:
    """N(mean, variance), in the unit of its field's name. Raises ValueError for what is not finite and for a variance below zero."""

    mean: float
    variance: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.variance)):
            raise ValueError(f"a normal needs a finite mean and variance, got {self.mean} and {self.variance}")
        if self.variance < 0.0:
            raise ValueError(f"a variance is never below zero, got {self.variance}")

    @classmethod
    def point(cls, value: float) -> Normal:
        """A known quantity."""
        return cls(value, 0.0)

    @property
    def deviation(self) -> float:
        return math.sqrt(self.variance)

    def quantile(self, probability: float) -> float:
        """The value that X stays below with this probability, which is in (0, 1)."""
        if not 0.0 < probability < 1.0:
            raise ValueError(f"a probability of a quantile is in (0, 1), got {probability}")
        return self.mean + self.deviation * normal_quantile(probability)

    def probability_above(self, value: float) -> float:
        """P(X > value); `value` may be infinite."""
        if math.isnan(value):
            raise ValueError("cannot compare with NaN")
        deviation = self.deviation
        if deviation == 0.0:
            return 1.0 if self.mean > value else 0.0
        return normal_below((self.mean - value) / deviation)

    def floored(self, low: float) -> Normal:
        """The normal with mean and variance of max(X, low)."""
        if math.isnan(low) or low == math.inf:
            raise ValueError(f"a floor is a number, got {low}")
        if self.mean - low >= FAR_DEVIATIONS * self.deviation:
            return self
        mean, variance = floored(np.array([self.mean - low]), np.array([self.variance]))
        return Normal(low + float(mean[0]), float(variance[0]))

    def capped(self, high: float) -> Normal:
        """The normal with mean and variance of min(X, high)."""
        mirrored = Normal(-self.mean, self.variance).floored(-high)
        return Normal(-mirrored.mean, mirrored.variance)

    def scaled(self, factor: float) -> Normal:
        """The distribution of factor * X: one quantity in another unit, not a sum of independent ones."""
        return Normal(self.mean * factor, self.variance * factor * factor)

    def shifted(self, offset: float) -> Normal:
        """X + offset."""
        return Normal(self.mean + offset, self.variance)

    def __add__(self, other: Normal) -> Normal:
        """The sum of two independent quantities."""
        return Normal(self.mean + other.mean, self.variance + other.variance)


def normal_below(z: float) -> float:
    """P(Z < z) of a standard normal, exact in both tails."""
    return 0.5 * math.erfc(-z * _INVERSE_SQRT_2)


def normal_quantile(probability: float) -> float:
    """The inverse of `normal_below`, for a probability in (0, 1)."""
    return _STANDARD.inv_cdf(probability)
