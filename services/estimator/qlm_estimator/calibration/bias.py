"""The factor by which times are longer than predicted: what is left once speed and lengths are learned. Pure.

The sum of what came over the sum of what the formulas said, which says as much of a wait to come as independent waits of its length fit
into the sums (`qlm_core.calibration.level_s`). Predictions that waited behind the same requests err alike, so a pair counts by the time
since the one before it, over the time that it stands for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.calibration import MEMORY, level_s

BIAS_MAX = 2.0
"""The factor is at most so large, and at least its inverse; a single pair counts no more than that."""
CHANGED = 0.1
"""Relative change of the learned speed from which on a prediction from before it says nothing of those that are made now."""
SHORT_S = 1.0
"""Added to both times, so that the ratio of two short ones tells little."""


@dataclass(slots=True)
class BiasFactor:
    """Faded sums of seconds: `came`, `said`; `pairs`: independent ones."""

    came: float = 0.0
    said: float = 0.0
    pairs: float = 0.0
    last_s: float = -math.inf

    @classmethod
    def restored(cls, factor: float, evidence_s: float, pairs: float) -> BiasFactor:
        """As published."""
        return cls(came=factor * evidence_s, said=evidence_s, pairs=pairs)

    def copy(self) -> BiasFactor:
        return BiasFactor(self.came, self.said, self.pairs, self.last_s)

    def add(self, at_s: float, own_s: float, actual_s: float) -> None:
        """A prediction told at `at_s`, by the formulas and by what came."""
        share = min(1.0, max(0.0, at_s - self.last_s) / (SHORT_S + max(own_s, actual_s)))
        self.last_s = max(self.last_s, at_s)
        kept = math.exp(-share / MEMORY)
        said = own_s + SHORT_S
        came = min(max(actual_s + SHORT_S, said / BIAS_MAX), said * BIAS_MAX)
        self.came, self.said = kept * self.came + share * came, kept * self.said + share * said
        self.pairs = kept * self.pairs + share

    @property
    def factor(self) -> float:
        """Of the seconds of the pairs."""
        return self.came / self.said if self.said > 0.0 else 1.0

    def level_s(self, own_s: float) -> float:
        """A mean of the formulas without its bias."""
        return float(level_s(self.factor, self.said, own_s))
