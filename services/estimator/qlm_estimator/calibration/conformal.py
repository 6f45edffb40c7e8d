"""Quantiles of prediction errors that track their own coverage. Pure.

Adaptive conformal inference (Gibbs and Candes, "Adaptive conformal inference under distribution shift", 2021): the quantile of the last
errors is taken at a level that rises after each miss and falls after each hit, so that the share of misses comes out as asked for,
whatever the errors do. Several rates run beside each other and are mixed by how well each would have done (DtACI: Gibbs and Candes,
"Conformal inference for online prediction with arbitrary distribution shifts", 2022), so that a change is followed at once and a steady
state is not disturbed. Steps are smaller the more outcomes are outstanding, by the root of their number (Joulani, Gyorgy and Szepesvari,
"Online learning under delayed feedback", 2013): none of them can know what the others already corrected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qlm_core.calibration import LEVELS, PRIOR_SCORE
from qlm_core.distribution import normal_quantile

ERRORS_MAX = 256
"""Errors that a row remembers."""
PRIOR_ERRORS = 16
"""Errors of the prior that a new row begins with, evenly over its normal."""
PRIOR_FADES_OVER = 4
"""Errors after which one of the prior's is forgotten."""
RATES = (0.002, 0.008, 0.032, 0.128)
"""Of the change of a level by an outcome: the range of DtACI, by factors of four."""
INTERVAL = 500.0
"""Outcomes that the mixture of rates is to be right over, as in DtACI."""
ASKED_MAX = 3.0
"""Times the share of misses that is to come, which the one that is asked of the errors is at the most."""
SHARE = 1.0 / (2.0 * INTERVAL)
"""Of the weights that is given evenly to all rates, as in DtACI."""


def _learning_rate(miss: float) -> float:
    """Of the weights of the rates, for a share of misses (DtACI, section 3)."""
    spread = (1.0 - miss) ** 2 * miss**3 + miss**2 * (1.0 - miss) ** 3
    return math.sqrt(3.0 / INTERVAL) * math.sqrt((math.log(INTERVAL * len(RATES)) + 2.0) / spread)


@dataclass(slots=True)
class _Level:
    """The share of misses that is asked of the errors, so that a share of `miss` comes: one for each rate, and their weights."""

    miss: float
    asked: list[float]
    weights: list[float] = field(default_factory=lambda: [1.0 / len(RATES)] * len(RATES))

    @property
    def level(self) -> float:
        return 1.0 - sum(weight * asked for weight, asked in zip(self.weights, self.asked, strict=True))

    def learn(self, missed: bool, place: float, outstanding: int) -> None:
        """`place`: share of the errors known so far that are above this one."""
        scale = _learning_rate(self.miss)
        losses = [self._loss(place, asked) for asked in self.asked]
        slower = (1.0 + outstanding) ** -0.5
        weights = [weight * math.exp(-scale * slower * loss) for weight, loss in zip(self.weights, losses, strict=True)]
        total = sum(weights)
        self.weights = [(1.0 - SHARE) * weight / total + SHARE / len(RATES) for weight in weights]
        step = slower * (self.miss - missed)
        self.asked = [min(ASKED_MAX * self.miss, max(0.0, asked + rate * step)) for asked, rate in zip(self.asked, RATES, strict=True)]

    def _loss(self, place: float, asked: float) -> float:
        return self.miss * (place - asked) - min(0.0, place - asked)


def _levels() -> list[_Level]:
    return [_Level(1.0 - level, [1.0 - level] * len(RATES)) for level in LEVELS]


def _prior() -> list[float]:
    return [PRIOR_SCORE * normal_quantile((number + 0.5) / PRIOR_ERRORS) for number in range(PRIOR_ERRORS)]


@dataclass(slots=True)
class ErrorQuantiles:
    """Of one kind of prediction: normalised errors, the oldest first, and a level for each of LEVELS."""

    _prior: list[float] = field(default_factory=_prior)
    _errors: list[float] = field(default_factory=list)
    _levels: list[_Level] = field(default_factory=_levels)
    _learned: int = 0

    def copy(self) -> ErrorQuantiles:
        """What another kind begins with that is like this one."""
        levels = [_Level(each.miss, list(each.asked), list(each.weights)) for each in self._levels]
        return ErrorQuantiles(list(self._prior), list(self._errors), levels, self._learned)

    def add(self, error: float) -> None:
        """An error is known."""
        self._errors.append(error)
        del self._errors[:-ERRORS_MAX]
        self._learned += 1
        if self._prior and self._learned % PRIOR_FADES_OVER == 0:
            # The innermost go last: what is left stays as wide.
            del self._prior[len(self._prior) // 2]

    def learn(self, which: int, missed: bool, error: float, outstanding: int) -> None:
        """Whether an outcome was beyond what was told for LEVELS[which], as soon as that is certain; `error`: at least so large then."""
        known = self._known()
        above = 1.0 - float(np.searchsorted(known, error, side="right")) / len(known)
        self._levels[which].learn(missed, above, outstanding)

    def quantiles(self, at_least: Sequence[float] = ()) -> tuple[float, ...]:
        """The normalised error of each of LEVELS, ascending, and 0 for the median: it is what the bias factor says, since a median of the
        last errors would follow each of their waves, late by a wait. A level beyond what the errors tell is as far above their largest as
        that is above their median, and a unit at the least: none is infinite. `at_least`: of those that are outstanding, which count as so
        large by now."""
        known = self._known(at_least)
        most = 1.0 - 1.0 / (len(known) + 1.0)
        beyond = known[-1] + max(1.0, known[-1] - float(np.median(known)))
        found = [beyond if (level := each.level) > most else float(np.quantile(known, level)) for each in self._levels]
        found[0] = 0.0
        return tuple(np.maximum.accumulate(found).tolist())

    def _known(self, at_least: Sequence[float] = ()) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.sort(np.array([*self._prior, *self._errors, *at_least]))
