"""The factor by which times are longer than predicted: what is left once speed and lengths are learned. Pure.

The sum of actual over the sum of predicted seconds. Predictions that waited behind the same requests err alike, so a pair counts by the
time since the prediction before it, over the longer of its two times; in the order of predictions, as requests with short outputs end
before older ones and would count for those too. A bias is believed as far as it stands out from the scatter of independent pairs: a normal
prior of mean 1 (`qlm_core.profiles.calibration.BIAS_DEVIATION`) against the observed variance, with the prior's own as one pair more (the
conjugate update of a normal mean, its variance by empirical Bayes: Efron and Morris, "Data analysis using Stein's estimator", 1975).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.profiles.calibration import BIAS_DEVIATION, MEMORY, level_s

BIAS_MAX = 2.0
"""The factor is at most so large, and at least its inverse; a single pair counts no more than that."""
CHANGED = 0.1
"""Relative change of the learned speed from which on a prediction from before it says nothing of those that are made now."""
SHORT_S = 1.0
"""Added to both times, so that the ratio of two short ones counts little."""


@dataclass(slots=True)
class BiasFactor:
    """Faded sums over pairs: actual and predicted seconds, squares of the actual over the predicted; `pairs`: independent ones."""

    actual_s: float = 0.0
    predicted_s: float = 0.0
    squares_s: float = 0.0
    pairs: float = 0.0
    last_s: float = -math.inf

    @classmethod
    def restored(cls, factor: float, evidence_s: float, pairs: float) -> BiasFactor:
        """With these published figures, and no scatter beside the prior's."""
        predicted_s = evidence_s / pairs if pairs > 0.0 else 0.0
        return cls(factor * predicted_s, predicted_s, factor * factor * predicted_s, pairs)

    def apart_s(self, at_s: float) -> float:
        """Seconds since the last prediction, of one that is made at `at_s`."""
        apart_s, self.last_s = at_s - self.last_s, max(self.last_s, at_s)
        return max(0.0, apart_s)

    def add(self, apart_s: float, own_s: float, actual_s: float) -> None:
        """A prediction of the formulas, made `apart_s` after the one before it, and the actual time."""
        share = min(1.0, apart_s / (SHORT_S + max(own_s, actual_s)))
        ratio = min(max((actual_s + SHORT_S) / (own_s + SHORT_S), 1.0 / BIAS_MAX), BIAS_MAX)
        kept, weight_s = math.exp(-share / MEMORY), share * (own_s + SHORT_S)
        self.actual_s, self.predicted_s = kept * self.actual_s + weight_s * ratio, kept * self.predicted_s + weight_s
        self.squares_s, self.pairs = kept * self.squares_s + weight_s * ratio * ratio, kept * self.pairs + share

    @property
    def factor(self) -> float:
        """Actual over predicted seconds of the pairs."""
        return self.actual_s / self.predicted_s if self.predicted_s > 0.0 else 1.0

    @property
    def evidence_s(self) -> float:
        """Seconds of predicted times, as many as would say as much with pairs that scatter by the prior's deviation."""
        if not (self.predicted_s > 0.0 and self.pairs > 0.0):
            return 0.0
        prior = BIAS_DEVIATION**2
        variance = max(0.0, self.squares_s / self.predicted_s - self.factor**2) + prior / self.pairs
        return self.predicted_s * prior / variance

    def level_s(self, own_s: float) -> float:
        """A mean of the formulas without its bias."""
        return float(level_s(self.factor, self.evidence_s, own_s))
