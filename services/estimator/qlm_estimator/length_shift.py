"""Notices that the outputs of a model became longer or shorter than its classes say, so much that what was learned before is wrong.

Classes fade by their own finishes, so a rare one would take hours to follow. A window over the finishes of all classes of a model tells
after some tens of them: the sum of the outputs against the sum of what was expected of each, beside the spread of their differences. A few
very long answers, or a burst of one tenant, move that sum and are no change of all: most requests must have left their median to one side
too (the sign test). Finishes come in the order of their starts (`start_order`). Pure.
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
ONE_SIDE_MIN = 0.75
"""And how large a share of the outputs is on that side of their own medians: half where nothing changed, 0.75 is four standard errors."""


@dataclass(slots=True)
class LengthShift:
    """Of one model."""

    _expected: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _made: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _above: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, expected_tokens: float, median_tokens: float, output_tokens: float) -> bool:
        """A finish, its mean and its median as they were expected; whether the outputs have changed. Then it begins anew."""
        self._above.append(0.5 * ((output_tokens > median_tokens) + (output_tokens >= median_tokens)))
        self._expected.append(expected_tokens)
        self._made.append(output_tokens)
        if len(self._made) < WINDOW:
            return False
        expected, made = sum(self._expected), sum(self._made)
        spread = sum((made - expected) ** 2 for made, expected in zip(self._made, self._expected, strict=True))
        changed = max(made, expected) >= RATIO_MIN * min(made, expected) and abs(made - expected) > DEVIATIONS_MIN * spread**0.5
        above = sum(self._above) / WINDOW
        changed = changed and (above if made > expected else 1.0 - above) >= ONE_SIDE_MIN
        if changed:
            self._expected.clear()
            self._made.clear()
            self._above.clear()
        return changed
