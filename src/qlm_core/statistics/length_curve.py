"""The distribution of a class's output lengths as shares of fixed bins: quantiles, and what is left of a request that has produced some.

The bins are the same everywhere (one token each up to 16, then four to each doubling, up to 2^20), so curves of different classes and of
different processes can be mixed share by share. Inside a bin every whole number of tokens is taken to be equally likely.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammainc

from qlm_core.statistics.distribution import Normal

FloatArray = npt.NDArray[np.float64]

EXACT_TOKENS_MAX = 16
BINS_PER_DOUBLING = 4
TOKENS_MAX = 1 << 20
"""Longer outputs count as so long."""

UPPERS: tuple[int, ...] = (
    *range(1, EXACT_TOKENS_MAX + 1),
    *(round(EXACT_TOKENS_MAX * 2 ** (step / BINS_PER_DOUBLING)) for step in range(1, BINS_PER_DOUBLING * 16 + 1)),
)
"""Most tokens of each bin; the least are those of the bin before, and one."""
BINS = len(UPPERS)

_HIGH: FloatArray = np.array(UPPERS, dtype=np.float64)
_EDGES: FloatArray = np.concatenate([[0.0], _HIGH])
_LOW: FloatArray = _EDGES[:-1]
_WIDTH: FloatArray = _HIGH - _LOW
_MEAN: FloatArray = (_LOW + 1.0 + _HIGH) / 2.0
_SQUARE: FloatArray = _MEAN**2 + (_WIDTH**2 - 1.0) / 12.0
_POWERS: FloatArray = np.stack([np.ones(BINS), _MEAN, _SQUARE])

LONGEST_OF: tuple[int, ...] = tuple(2**power for power in range(12))
"""Counts of outputs for which the longest is worked out: 1 to 2,048."""

SHARE_MIN = 1e-9
"""Less than this above some length is rounding: nothing of the class is that long."""
TAIL_SHAPE = 3.0
"""Beyond all lengths that were seen the tail is taken to be Pareto's of this shape: half as long again is left, give or take."""


def bin_of(tokens: float) -> int:
    """The bin of an output of so many tokens; those below one count as one."""
    return min(bisect_left(UPPERS, tokens), BINS - 1)


@dataclass(frozen=True, slots=True, eq=False)
class LengthCurve:
    """Output lengths in tokens. `shares`: of the bins, in order; they are divided by their sum. Raises ValueError where there are not
    BINS of them, one is negative or not finite, or none is above zero. Lookups cost O(1)."""

    shares: FloatArray
    _above: FloatArray = field(init=False, repr=False)
    _above_tokens: FloatArray = field(init=False, repr=False)
    _above_squares: FloatArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shares = np.asarray(self.shares, dtype=np.float64)
        total = float(shares.sum())
        if shares.shape != (BINS,) or not 0.0 < total < math.inf or float(shares.min()) < 0.0:
            raise ValueError(f"a length curve has {BINS} finite shares >= 0, not all zero")
        shares = shares / total
        above = np.zeros((3, BINS + 1))
        np.add.accumulate((_POWERS * shares)[:, ::-1], axis=1, out=above[:, -2::-1])
        object.__setattr__(self, "shares", shares)
        object.__setattr__(self, "_above", above[0])
        object.__setattr__(self, "_above_tokens", above[1])
        object.__setattr__(self, "_above_squares", above[2])

    @property
    def output_tokens(self) -> Normal:
        """Mean and variance of the length."""
        mean = float(self._above_tokens[0] / self._above[0])
        return Normal(mean, max(0.0, float(self._above_squares[0] / self._above[0]) - mean * mean))

    def survival(self, produced_tokens: float) -> float:
        """P(O > a)."""
        return float(self.survival_of(produced_tokens))

    def survival_of(self, produced_tokens: npt.ArrayLike) -> FloatArray:
        """`survival` of many. Even inside a bin."""
        found: FloatArray = np.interp(np.floor(produced_tokens), _EDGES, self._above)
        return found

    def quantile(self, probability: float) -> float:
        """The length that outputs stay at or below with this probability, which is in (0, 1)."""
        if not 0.0 < probability < 1.0:
            raise ValueError(f"a probability of a quantile is in (0, 1), got {probability}")
        up_to = 1.0 - self._above[1:]
        index = min(int(np.searchsorted(up_to, probability - SHARE_MIN)), BINS - 1)
        share = float(self.shares[index])
        part = 1.0 if share <= 0.0 else (probability - (1.0 - float(self._above[index]))) / share
        return float(_LOW[index]) + max(1.0, min(1.0, part) * float(_WIDTH[index]))

    def quantile_of(self, probabilities: FloatArray) -> FloatArray:
        """`quantile` of many: a tenth of the time for 64."""
        index = np.minimum(np.searchsorted(1.0 - self._above[1:], probabilities - SHARE_MIN), BINS - 1)
        share = self.shares[index]
        part = np.where(share > 0.0, (probabilities - (1.0 - self._above[index])) / np.where(share > 0.0, share, 1.0), 1.0)
        found: FloatArray = _LOW[index] + np.maximum(1.0, np.minimum(1.0, part) * _WIDTH[index])
        return found

    def quantiles(self, probabilities: Sequence[float]) -> FloatArray:
        """`quantile` of many, without rounding to whole tokens. A microsecond each."""
        found: FloatArray = np.interp(probabilities, 1.0 - self._above, _EDGES)
        return found

    @property
    def median_tokens(self) -> float:
        return self.quantile(0.5)

    def longest(self) -> FloatArray:
        """The longest of so many outputs, expected: for the counts of `LONGEST_OF`. The sum of P(longest > a) over all a, by trapezoids."""
        longer = 1.0 - (1.0 - np.minimum(self._above, 1.0)) ** np.array(LONGEST_OF)[:, None]
        found: FloatArray = 0.5 + ((longer[:, :-1] + longer[:, 1:]) / 2.0) @ _WIDTH
        return found

    def left(self, produced_tokens: float, most: float = math.inf) -> Normal:
        """Predicts the remaining output of an unended request after so many tokens, of `most` >= 1 at the most: mean and variance of
        min(O - a, most) given O > a. Raises ValueError for produced tokens that are not finite or negative."""
        if not 0.0 <= produced_tokens < math.inf:
            raise ValueError(f"produced tokens are finite and >= 0, got {produced_tokens}")
        mean, variance = self.left_of(np.array([produced_tokens]))
        whole = Normal(float(mean[0]), float(variance[0]))
        if most == math.inf:
            return whole
        produced = math.floor(produced_tokens)
        above, tokens, squares = np.array(self.beyond(np.array([produced, produced + most]))).tolist()
        if above[0] <= SHARE_MIN:
            return whole.floored(1.0).capped(most)
        ending = above[0] - above[1]
        ending_tokens = tokens[0] - tokens[1]
        first = ending_tokens - produced * ending + most * above[1]
        second = squares[0] - squares[1] - 2.0 * produced * ending_tokens + produced**2 * ending + most**2 * above[1]
        mean_left = first / above[0]
        return Normal(mean_left, max(0.0, second / above[0] - mean_left**2))

    def left_of(self, produced_tokens: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        """`left` of many: means and variances, in tokens and tokens squared."""
        produced = np.floor(np.asarray(produced_tokens, dtype=np.float64))
        above, tokens, squares = self.beyond(produced)
        known = above > SHARE_MIN
        safe = np.where(known, above, 1.0)
        mean = tokens / safe
        variance = np.maximum(squares / safe - mean**2, 0.0)
        tail = np.maximum(produced, 1.0) / (TAIL_SHAPE - 1.0)
        tail_variance = np.maximum(produced, 1.0) ** 2 * TAIL_SHAPE / ((TAIL_SHAPE - 1.0) ** 2 * (TAIL_SHAPE - 2.0))
        return np.where(known, mean - produced, tail), np.where(known, variance, tail_variance)

    def beyond(self, produced: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Share, tokens and squared tokens of outputs longer than each of `produced`."""
        low = np.maximum(np.floor(produced), 0.0)
        index = np.searchsorted(_HIGH, low, side="right")
        inside = index < BINS
        at = np.minimum(index, BINS - 1)
        high = _HIGH[at]
        count = np.maximum(high - low, 0.0)
        share = np.where(inside, self.shares[at] * count / _WIDTH[at], 0.0)
        mean = (low + 1.0 + high) / 2.0
        square = mean**2 + np.maximum(count**2 - 1.0, 0.0) / 12.0
        after = np.minimum(index + 1, BINS)
        return (
            share + self._above[after],
            share * mean + self._above_tokens[after],
            share * square + self._above_squares[after],
        )

    def mixed(self, other: LengthCurve, weight: float) -> LengthCurve:
        """The mixture with `weight` of this curve and the rest of the other."""
        return LengthCurve(weight * self.shares + (1.0 - weight) * other.shares)


def longest_of_counts(table: FloatArray, of: npt.NDArray[np.int64], count: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The longest of so many outputs of each class, by what `LengthCurve.longest` found: even between two counts in their logarithms; and
    how it grows with the natural logarithm of the count, which is the scale of its Gumbel limit. `table` [curves, len(LONGEST_OF)]; `of`
    [classes]: the curve of each; `count` [classes]."""
    place = np.log2(np.clip(count, 1.0, LONGEST_OF[-1]))
    under = np.minimum(place.astype(np.int64), len(LONGEST_OF) - 2)
    low, high = table[of, under], table[of, under + 1]
    return low + (place - under) * (high - low), (high - low) / math.log(2.0)


def longest_among(table: Sequence[float], count: float) -> float:
    """`longest_of_counts` of one."""
    return float(longest_of_counts(np.array([table]), np.zeros(1, dtype=np.int64), np.array([count]))[0][0])


def packed(shares: FloatArray) -> tuple[int, tuple[float, ...]]:
    """The first bin with a share and the shares from there to the last one above zero, in single precision, for a message."""
    used = np.flatnonzero(shares > 0.0)
    if not used.size:
        return 0, ()
    first, last = int(used[0]), int(used[-1])
    return first, tuple(float(share) for share in shares[first : last + 1].astype(np.float32))


def unpacked(first: int, shares: Sequence[float]) -> LengthCurve:
    """The curve that `packed` wrote. Raises ValueError."""
    if first < 0 or first + len(shares) > BINS:
        raise ValueError(f"shares of bins {first} to {first + len(shares) - 1}: there are {BINS}")
    every: FloatArray = np.zeros(BINS)
    every[first : first + len(shares)] = shares
    return LengthCurve(every)


@lru_cache(maxsize=1024)
def curve_of_moments(mean_tokens: float, variance: float) -> LengthCurve:
    """Returns the curve of lengths whose mean > 0 and variance alone are known: a gamma distribution; all alike for no variance."""
    if variance <= 1e-9 * mean_tokens**2:
        shares: FloatArray = np.zeros(BINS)
        shares[bin_of(mean_tokens)] = 1.0
        return LengthCurve(shares)
    up_to = gammainc(mean_tokens**2 / variance, (_HIGH + 0.5) * mean_tokens / variance)
    return LengthCurve(np.maximum(np.diff(np.concatenate([[0.0], up_to[:-1], [1.0]])), 0.0))
