"""Follows a drift that all outputs of a model have in common: a factor on what its classes say.

Outputs drift by a tenth within the time that a request waits, and classes fade by their own finishes: a rare one is always late. What the
finishes of all classes have in common is known much sooner. It is taken from logarithms, so that the tail of one tenant does not move it,
and leans on no drift. As the classes learn the new lengths it goes back to one. Only
classes with a predicted output count. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 1_000.0
"""Finished requests of a model after which an old one weighs 1 / e."""
DRIFT_DEVIATION = 0.03
"""Standard deviation that the logarithm of the level is believed to have before any finish: the less classes tell of outputs, the more
finishes it takes to believe a drift."""
DEVIATION_MAX = 1.5
"""Largest logarithm of an output over what is usual in its class that counts."""


def deviation(output_tokens: float, usual_log: float) -> float:
    """Of an output from what is usual in its class, as a logarithm that is bounded. Usual is where such deviations are zero in the mean
    (Huber, Robust estimation of a location parameter, 1964)."""
    return min(max(math.log(output_tokens) - usual_log, -DEVIATION_MAX), DEVIATION_MAX)


@dataclass(slots=True)
class LengthLevel:
    """Of one model."""

    _deviations: float = 0.0
    _squares: float = 0.0
    _samples: float = 0.0

    def add(self, deviation: float) -> None:
        """A finish: `deviation` of its class."""
        kept = 1.0 - 1.0 / MEMORY
        self._deviations = kept * self._deviations + deviation
        self._squares = kept * self._squares + deviation * deviation
        self._samples = kept * self._samples + 1.0

    @property
    def factor(self) -> float:
        """Of the model's outputs now, over what its classes say."""
        if self._samples <= 0.0:
            return 1.0
        return math.exp(self._deviations / (self._samples + self._squares / self._samples / DRIFT_DEVIATION**2))
