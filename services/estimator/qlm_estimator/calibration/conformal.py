"""Quantiles of prediction errors that track their own coverage. Pure.

Adaptive conformal inference (Gibbs and Candes, "Adaptive conformal inference under distribution shift", 2021): the quantile of the last
errors is taken at a level that rises after each miss and falls after each hit, so that the share of misses comes out as requested,
whatever the errors do. Several rates run beside each other and are mixed by how well each would have done (DtACI: Gibbs and Candes,
"Conformal inference for online prediction with arbitrary distribution shifts", 2022), so that a change is followed at once and a steady
state is not disturbed (mixed evenly, p90 - p50 is 4 to 9% wider on `azure` and `drift`). Steps are smaller the more outcomes are
outstanding, by the root of their number (Joulani, Gyorgy and Szepesvari, "Online learning under delayed feedback", 2013): none of them can
know what the others already corrected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qlm_core.profiles.calibration import LEVELS, MEMORY, PRIOR_SCORE
from qlm_core.statistics.distribution import normal_quantile
from qlm_core.statistics.normal_arrays import Floats

ERRORS_MAX = 256
"""Errors that a row remembers."""
PRIOR_POINTS = 16
"""Errors of the prior, evenly over its normal: together they weigh as much as one wait, the one to come, of which nothing is known."""
RATES = (0.002, 0.008, 0.032, 0.128)
"""Change of a level by one outcome: the range of DtACI, by factors of four."""
INTERVAL = 500.0
"""Outcomes that the mixture of rates is to be right over, as in DtACI."""
NOMINAL_MAX = 3.0
"""Largest nominal share of misses, as a multiple of the share that is to come."""
SHARE = 1.0 / (2.0 * INTERVAL)
"""Share of the weights that is divided evenly among all rates, as in DtACI."""


def _learning_rate(miss: float) -> float:
    """Returns the learning rate of the rates' weights, for a share of misses (DtACI, section 3)."""
    spread = (1.0 - miss) ** 2 * miss**3 + miss**2 * (1.0 - miss) ** 3
    return math.sqrt(3.0 / INTERVAL) * math.sqrt((math.log(INTERVAL * len(RATES)) + 2.0) / spread)


@dataclass(slots=True)
class _Level:
    """The nominal shares of misses that lead to a share of `miss`: one for each rate, and their weights."""

    miss: float
    nominal: list[float]
    weights: list[float] = field(default_factory=lambda: [1.0 / len(RATES)] * len(RATES))

    @property
    def level(self) -> float:
        return 1.0 - sum(weight * share for weight, share in zip(self.weights, self.nominal, strict=True))

    def learn(self, missed: bool, place: float, outstanding: int) -> None:
        """`place`: share of the errors known so far that are above this one."""
        scale = _learning_rate(self.miss)
        losses = [self.miss * (place - share) - min(0.0, place - share) for share in self.nominal]
        slower = (1.0 + outstanding) ** -0.5
        weights = [weight * math.exp(-scale * slower * loss) for weight, loss in zip(self.weights, losses, strict=True)]
        total = sum(weights)
        self.weights = [(1.0 - SHARE) * weight / total + SHARE / len(RATES) for weight in weights]
        most, step = NOMINAL_MAX * self.miss, slower * (self.miss - missed)
        self.nominal = [min(most, max(0.0, share + rate * step)) for share, rate in zip(self.nominal, RATES, strict=True)]


ROUNDING = 1e-9
"""Tolerance of a sum of weights."""
_PRIOR_ERRORS: Floats = np.array([PRIOR_SCORE * normal_quantile((number + 0.5) / PRIOR_POINTS) for number in range(PRIOR_POINTS)])
_PRIOR_WEIGHTS: Floats = np.full(PRIOR_POINTS, 1.0 / PRIOR_POINTS)

Weighted = tuple[float, float]
"""An error and its weight: the share of a wait since the prediction before it, since predictions that wait behind the same requests err
alike. However many there are, they are no more evidence than independent waits fit into their time."""


@dataclass(slots=True)
class ErrorQuantiles:
    """Errors of one kind of prediction: normalised errors and their weights, the oldest first, and a level for each of LEVELS."""

    _errors: Floats = field(default_factory=lambda: np.empty(0))
    _weights: Floats = field(default_factory=lambda: np.empty(0))
    _levels: list[_Level] = field(default_factory=lambda: [_Level(1.0 - level, [1.0 - level] * len(RATES)) for level in LEVELS])

    @classmethod
    def restored(cls, quantiles: Sequence[float], waits: float) -> ErrorQuantiles:
        """With these quantiles, which rest on so many waits beside the prior: errors that have them, at the initial levels."""
        of_prior = (float(_PRIOR_WEIGHTS[quantile >= _PRIOR_ERRORS].sum()) for quantile in quantiles)
        upto = [min(waits, level * (waits + 1.0) - prior + ROUNDING) for level, prior in zip(LEVELS, of_prior, strict=True)]
        return cls(np.array(quantiles), np.maximum(np.diff([0.0, *upto]), 0.0))

    def add(self, error: float, weight: float) -> None:
        """An error is known; those before it fade as the factor's pairs do (Barber et al., "Conformal prediction beyond exchangeability",
        2023)."""
        kept = math.exp(-weight / MEMORY)
        self._errors = np.append(self._errors[1 - ERRORS_MAX :], error)
        self._weights = np.append(kept * self._weights[1 - ERRORS_MAX :], weight)

    def learn(self, which: int, missed: bool, error: float, outstanding: int) -> None:
        """Whether an outcome was beyond the quantile LEVELS[which], as soon as that is certain; `error`: at least so large then."""
        above = _PRIOR_WEIGHTS[error < _PRIOR_ERRORS].sum() + self._weights[self._errors > error].sum()
        self._levels[which].learn(missed, float(above / (_PRIOR_WEIGHTS.sum() + self._weights.sum())), outstanding)

    def quantiles(self, at_least: Sequence[Weighted] = ()) -> tuple[float, ...]:
        """The normalised error of each of LEVELS, ascending, and 0 for the median: it is what the bias factor says, since a median of the
        last errors would follow each of their waves, late by a wait. None is infinite: the prior has a largest error. `at_least`: of those
        that are outstanding, which count as so large by now."""
        late = np.array(at_least).reshape(-1, 2)
        errors = np.concatenate((_PRIOR_ERRORS, self._errors, late[:, 0]))
        order = np.argsort(errors, kind="stable")
        below = np.cumsum(np.concatenate((_PRIOR_WEIGHTS, self._weights, late[:, 1]))[order])
        at = np.searchsorted(below / below[-1], [each.level for each in self._levels])
        found = errors[order][np.minimum(at, len(errors) - 1)]
        found[0] = 0.0
        return tuple(np.maximum.accumulate(found).tolist())
