"""How fast the queue drains, and what hint that gives to a client that was refused. Pure."""

from __future__ import annotations

import math
from collections import Counter

PRIOR_PER_S = 10.0
"""Terminal transitions per second that are believed before any were seen."""
PRIOR_S = 2.0
"""Seconds of observation that weigh as much as the prior."""
MEMORY_S = 30.0
"""Observations this old weigh 1/e."""
PLACES_MAX = 1_000
"""Full tenants and classes that are counted apart between two observations; the others wait in one line."""
RETRY_AFTER_MIN_S = 0.1
RETRY_AFTER_MAX_S = 300.0


class DrainRate:
    """Requests that end per second: an exponentially weighted mean over `MEMORY_S` that leans on a prior until there is data."""

    def __init__(self) -> None:
        self._ended = PRIOR_PER_S * PRIOR_S
        self._seconds = PRIOR_S
        self._seen: tuple[float, int] | None = None
        self._refused: Counter[str] = Counter()

    @property
    def per_s(self) -> float:
        return self._ended / self._seconds

    def observe(self, now_s: float, ended_count: int) -> None:
        """`ended_count`: all requests that ever ended. A count that fell (another server) starts afresh."""
        before, self._seen = self._seen, (now_s, ended_count)
        self._refused.clear()
        if before is None or now_s <= before[0] or ended_count < before[1]:
            return
        elapsed_s = now_s - before[0]
        kept = math.exp(-elapsed_s / MEMORY_S)
        self._ended = self._ended * kept + (ended_count - before[1])
        self._seconds = self._seconds * kept + elapsed_s

    def retry_after_s(self, *, share: float = 1.0, place: str = "") -> float:
        """When a place is free for a request refused now: those refused since the last observation wait for one too. `place`: what is
        full; of all that end, `share` in (0, 1] gives a place there."""
        if place not in self._refused and len(self._refused) >= PLACES_MAX:
            place = ""
        self._refused[place] += 1
        rate = self.per_s * share
        seconds = self._refused[place] / rate if rate > 0.0 else math.inf
        return min(max(seconds, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
