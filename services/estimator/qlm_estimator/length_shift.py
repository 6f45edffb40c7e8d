"""Notices that the outputs of a model became longer or shorter than its classes say, so much that what was learned before is wrong.

Classes fade by their own finishes, so a rare one would take hours to follow. A window over the finishes of all classes of a model tells
after some tens of them: the sum of the outputs against the sum of what was expected of each, beside the spread of their differences. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 64
"""Finishes that are looked at."""
RATIO_MIN = 1.3
"""Outputs over expectations, or the other way round, from which on the old is given up."""
DEVIATIONS_MIN = 5.0
"""And by how many standard errors they differ."""


@dataclass(slots=True)
class LengthShift:
    """Of one model."""

    _expected: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _made: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, expected_tokens: float, output_tokens: float) -> bool:
        """A finish; whether the outputs have changed. Then it begins anew."""
        self._expected.append(expected_tokens)
        self._made.append(output_tokens)
        if len(self._made) < WINDOW:
            return False
        expected, made = sum(self._expected), sum(self._made)
        spread = sum((made - expected) ** 2 for made, expected in zip(self._made, self._expected, strict=True))
        changed = max(made, expected) >= RATIO_MIN * min(made, expected) and abs(made - expected) > DEVIATIONS_MIN * spread**0.5
        if changed:
            self._expected.clear()
            self._made.clear()
        return changed
