"""Output lengths of one class of requests, old ones fading, with lengths so far of unended requests as lower bounds.

A finished request that made a tokens says "exactly a"; one that runs and has made a, or was cancelled then, says "more than a". To leave
the latter out underestimates, since the long ones are still running when the short ones have finished. The estimate is Kaplan and Meier's
(Nonparametric estimation from incomplete observations, JASA 1958) on the bins of `LengthCurve`, where a request weighs by when it started,
not by when it ended: a window over ends would hold, beside the long requests that run, those that started long before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from qlm_core.profiles.workload_profile import WORKLOAD_PRIOR
from qlm_core.statistics.length_curve import BINS, UPPERS, FloatArray, LengthCurve, bin_of

RESCALE_EXPONENT = 60.0
"""Weights grow by e^60 before all are divided."""
WEIGHT_MIN = 1e-3
"""A finish that weighs less says nothing any more."""
OUTLIERS_MAX = 3.0
"""Finishes of a class, faded, that may be outliers: usual is what all but so many stay below. A class that really grew shows more of them,
which are usual then, and so its bound grows."""
OUTLIER_FACTOR = 8.0
"""An output longer than this times what is usual in the class, or in the prior, counts as so long."""
USUAL_TOKENS = WORKLOAD_PRIOR.output_curve().quantile(0.95)
"""Length assumed for a class without data."""

_MIDDLES: FloatArray = (np.array([1, *(upper + 1 for upper in UPPERS[:-1])]) + np.array(UPPERS)) / 2.0
"""Middles of the bins, in tokens."""


class FadingLengths:
    """One class. `clock`: its finishes so far; a request that started when it was c weighs exp(-(clock - c) / memory)."""

    def __init__(self, memory: float) -> None:
        self.clock = 0.0
        self._rate = -math.log1p(-1.0 / memory)
        self._origin = 0.0
        self._ended: FloatArray = np.zeros(BINS)
        self._tokens: FloatArray = np.zeros(BINS)
        self._given_up: FloatArray = np.zeros(BINS)
        self._bound_tokens = OUTLIER_FACTOR * USUAL_TOKENS

    def restore(self, samples: float, curve: LengthCurve, mean_tokens: float) -> None:
        """Begins with a published curve and mean, as of so many finishes now."""
        self.clock = 1.0
        self._ended = curve.shares * samples
        self._tokens = self._ended * _MIDDLES * (mean_tokens / float(curve.shares @ _MIDDLES))
        self._bound()

    def finish(self, output_tokens: float, started: float) -> None:
        """A request made so many tokens and ended. `started`: this class's clock at its start."""
        self._rescale()
        tokens = min(output_tokens, self._bound_tokens)
        self.clock += 1.0
        weight, index = self._weight(started), bin_of(tokens)
        self._ended[index] += weight
        self._tokens[index] += weight * tokens
        self._bound()

    def give_up(self, produced_tokens: float, started: float) -> None:
        """A request was cancelled, expired or failed after so many tokens."""
        self._rescale()
        if produced_tokens >= 1.0:
            self._given_up[bin_of(min(produced_tokens, self._bound_tokens))] += self._weight(started)

    def censored(self, running: FloatArray) -> float:
        """Requests that are only known to be longer than something, faded."""
        return float(self._given_up.sum()) * self._now() + float(running.sum())

    def running_of(self, lower_bounds: Iterable[tuple[float, float]]) -> FloatArray:
        """Weights by bin of requests that run: (tokens made at least, clock at their start) of each."""
        running: FloatArray = np.zeros(BINS)
        for tokens, started in lower_bounds:
            if tokens >= 1.0:
                running[bin_of(min(tokens, self._bound_tokens))] += math.exp(-self._rate * max(0.0, self.clock - 1.0 - started))
        return running

    def curve(self, running: FloatArray, wider: LengthCurve) -> LengthCurve | None:
        """The distribution; None before anything has finished. The share that outlives all finished ones is spread as the wider class's
        lengths are there, or as long again where that has none so long."""
        ended = self._ended * self._now()
        if ended.sum() < WEIGHT_MIN:
            return None
        alive = ended + self._given_up * self._now() + running
        # Those lost in a bin were at risk in half of it (the actuarial rule).
        at_risk = np.cumsum(alive[::-1])[::-1] - 0.5 * (alive - ended)
        hazard = np.divide(ended, at_risk, out=np.zeros(BINS), where=at_risk > 0.0)
        surviving = np.cumprod(1.0 - np.minimum(hazard, 1.0))
        shares = np.concatenate([[1.0], surviving[:-1]]) - surviving
        left = float(surviving[-1])
        if left > 0.0:
            last = int(np.flatnonzero(alive > 0.0)[-1])
            beyond = np.where(np.arange(BINS) > last, wider.shares, 0.0)
            if beyond.sum() < 1e-6:
                beyond[bin_of(2.0 * UPPERS[last])] = 1.0
            shares = shares + left * beyond / beyond.sum()
        return LengthCurve(np.maximum(shares, 0.0))

    def moments(self, curve: LengthCurve) -> tuple[float, float]:
        """Mean and variance of a curve of this class: of each bin the mean of what finished in it, rather than its middle."""
        means = np.divide(self._tokens, self._ended, out=_MIDDLES.copy(), where=self._ended > 0.0)
        mean = float(curve.shares @ means)
        return mean, max(0.0, float(curve.shares @ means**2) - mean * mean)

    def _bound(self) -> None:
        above = np.cumsum(self._ended[::-1])[::-1] * self._now()
        usual = UPPERS[int(np.count_nonzero(above > OUTLIERS_MAX)) - 1] if above[0] > OUTLIERS_MAX else 0
        self._bound_tokens = OUTLIER_FACTOR * max(usual, USUAL_TOKENS)

    def _weight(self, started: float) -> float:
        return math.exp(self._rate * (min(started, self.clock) - self._origin))

    def _now(self) -> float:
        """Factor of stored weights: with it the newest finish weighs one if it started just before."""
        return math.exp(-self._rate * max(0.0, self.clock - 1.0 - self._origin))

    def _rescale(self) -> None:
        if self._rate * (self.clock - self._origin) > RESCALE_EXPONENT:
            factor = self._now()
            for weights in (self._ended, self._tokens, self._given_up):
                weights *= factor
            self._origin = self.clock - 1.0
