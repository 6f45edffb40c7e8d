"""Call numbers, and when the server may be asked again after it did not answer."""

from __future__ import annotations

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0


class ServerLink:
    """One backoff for all calls: they go to one server. It doubles with each failed try and ends with the first answer."""

    def __init__(self) -> None:
        self._number = 0
        self._backoff_s = 0.0
        self._away_until_s: float | None = None

    @property
    def away_until_s(self) -> float | None:
        """Before this no call is made; None while the server answers."""
        return self._away_until_s

    def next_call(self) -> int:
        self._number += 1
        return self._number

    def usable(self, now_s: float) -> bool:
        return self._away_until_s is None or now_s >= self._away_until_s

    def lost(self, now_s: float) -> None:
        """A call was not answered. Several that were under way together count once."""
        if self.usable(now_s):
            self._backoff_s = min(BACKOFF_MAX_S, max(BACKOFF_MIN_S, 2 * self._backoff_s))
            self._away_until_s = now_s + self._backoff_s

    def answered(self) -> None:
        self._backoff_s = 0.0
        self._away_until_s = None
