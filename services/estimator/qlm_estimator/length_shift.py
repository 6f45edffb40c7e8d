"""Notices that the outputs of a model became longer or shorter than its classes say, so much that what was learned before is wrong.

Classes fade by their own finishes, so a rare one would take hours to follow. A window over the finishes of all classes of a model tells
within half a minute: the sum of the outputs against the sum of what was expected of each, beside the spread of their differences. A few
very long answers, or a burst of one tenant, move that sum and are no change of all: most requests must have left their median to one side
too (the sign test). Where many finish in a second they do so together, a burst of arrivals or those that one long prefill held up, so the
window is as long in seconds as it is in finishes. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 64
"""Finishes that are looked at, at least."""
WINDOW_S = 20.0
"""Seconds that they are of, at least."""
PART_S = 1.0
"""Finishes so near to each other are kept as sums."""
RATIO_MIN = 1.3
"""Outputs over expectations, or the other way round, from which on the old is given up."""
DEVIATIONS_MIN = 5.0
"""And by how many standard errors they differ."""
ONE_SIDE_MIN = 0.75
"""And how large a share of the outputs is on that side of their own medians: half where nothing changed, 0.75 is four standard errors."""


@dataclass(slots=True)
class _Part:
    """Sums over the finishes of a second, from `since_s` on: `squares` of the differences, `above` the median."""

    since_s: float
    count: int = 0
    expected: float = 0.0
    made: float = 0.0
    squares: float = 0.0
    above: float = 0.0


@dataclass(slots=True)
class LengthShift:
    """Of one model."""

    _parts: deque[_Part] = field(default_factory=deque)

    def add(self, at_s: float, expected_tokens: float, median_tokens: float, output_tokens: float) -> bool:
        """A finish, its mean and its median as they were expected; whether the outputs have changed. Then it begins anew, as it does where
        the clock was set back."""
        parts = self._parts
        if parts and at_s < parts[-1].since_s - WINDOW_S:
            parts.clear()
        if not parts or at_s >= parts[-1].since_s + PART_S:
            parts.append(_Part(at_s))
        part = parts[-1]
        part.count += 1
        part.expected += expected_tokens
        part.made += output_tokens
        part.squares += (output_tokens - expected_tokens) ** 2
        part.above += 0.5 * ((output_tokens > median_tokens) + (output_tokens >= median_tokens))
        count = sum(part.count for part in parts)
        while len(parts) > 1 and count - parts[0].count >= WINDOW and at_s - parts[1].since_s >= WINDOW_S:
            count -= parts.popleft().count
        if count < WINDOW or at_s - parts[0].since_s < WINDOW_S:
            return False
        changed = self._changed(count)
        if changed:
            parts.clear()
        return changed

    def _changed(self, count: int) -> bool:
        expected, made = sum(part.expected for part in self._parts), sum(part.made for part in self._parts)
        spread = sum(part.squares for part in self._parts)
        changed = max(made, expected) >= RATIO_MIN * min(made, expected) and abs(made - expected) > DEVIATIONS_MIN * spread**0.5
        above = sum(part.above for part in self._parts) / count
        return changed and (above if made > expected else 1.0 - above) >= ONE_SIDE_MIN
