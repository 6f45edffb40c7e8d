"""The factor by which times are longer than predicted: what is left once speed and lengths are learned. Pure.

The sum of what came over the sum of what the formulas said, which begins with no bias at all. Predictions that waited behind the same
requests err alike, so a pair counts by the time since the one before it, over the time that it stands for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 10.0
"""Independent pairs after which an old one weighs 1 / e."""
PRIOR_PAIRS = 1.0
"""Independent pairs that no bias at all weighs as much as in the beginning: a lasting bias is taken to be about as large as the error of
one wait. It fades as pairs do."""
BIAS_MAX = 2.0
"""The factor is at most so large, and at least its inverse; a single pair counts no more than that."""
CHANGED = 0.1
"""Relative change of the learned speed from which on a prediction from before it says nothing of those that are made now."""
SHORT_S = 1.0
"""Added to both times, so that the ratio of two short ones tells little."""


@dataclass(slots=True)
class BiasFactor:
    """Faded sums of seconds: `came`, `said`; `pairs`: independent ones, `prior`: what is left of PRIOR_PAIRS."""

    came: float = 0.0
    said: float = 0.0
    pairs: float = 0.0
    prior: float = PRIOR_PAIRS
    last_s: float = -math.inf

    @classmethod
    def restored(cls, factor: float, pairs: float) -> BiasFactor:
        """As published; pairs of a second, which the next ones outweigh."""
        said = SHORT_S * (pairs + PRIOR_PAIRS)
        return cls(came=factor * said, said=said, pairs=pairs, prior=0.0)

    def copy(self) -> BiasFactor:
        return BiasFactor(self.came, self.said, self.pairs, self.prior, self.last_s)

    def add(self, at_s: float, own_s: float, actual_s: float) -> None:
        """A prediction told at `at_s`, by the formulas and by what came."""
        share = min(1.0, max(0.0, at_s - self.last_s) / (SHORT_S + max(own_s, actual_s)))
        self.last_s = max(self.last_s, at_s)
        kept = math.exp(-share / MEMORY)
        said = own_s + SHORT_S
        came = min(max(actual_s + SHORT_S, said / BIAS_MAX), said * BIAS_MAX)
        self.came, self.said = kept * self.came + share * came, kept * self.said + share * said
        self.pairs, self.prior = kept * self.pairs + share, kept * self.prior

    @property
    def factor(self) -> float:
        """Of the seconds of the pairs, and as many a pair of the prior."""
        if self.said <= 0.0:
            return 1.0
        prior_s = self.prior * self.said / max(self.pairs, 1e-9)
        return (self.came + prior_s) / (self.said + prior_s)
