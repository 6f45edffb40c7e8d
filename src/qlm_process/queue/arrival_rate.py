"""How many requests come in a second, as the queue's own count of what it accepted shows it."""

from __future__ import annotations

import math

MEMORY_S = 30.0
"""Arrivals this old weigh 1/e."""


class ArrivalRate:
    """Starts at zero: what was never seen to come is not expected."""

    def __init__(self) -> None:
        self._arrived = 0.0
        self._seconds = 0.0
        self._seen: tuple[float, int] | None = None

    @property
    def per_s(self) -> float:
        return self._arrived / self._seconds if self._seconds > 0.0 else 0.0

    def observe(self, now_s: float, accepted_count: int) -> None:
        """`accepted_count`: all requests that were ever accepted. A count or a time that fell (another server) starts afresh."""
        before, self._seen = self._seen, (now_s, accepted_count)
        if before is None or now_s <= before[0] or accepted_count < before[1]:
            return
        elapsed_s = now_s - before[0]
        kept = math.exp(-elapsed_s / MEMORY_S)
        self._arrived = self._arrived * kept + (accepted_count - before[1])
        self._seconds = self._seconds * kept + elapsed_s
