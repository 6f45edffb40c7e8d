"""A link between memories that carries one transfer at a time."""

from __future__ import annotations


class Link:
    """Carries transfers one after another in the order of booking. A cancelled transfer still takes its time."""

    def __init__(self) -> None:
        self._free_at_s = 0.0

    def carry(self, now_s: float, took_s: float) -> float:
        """Books a transfer of so many seconds; returns when it is over."""
        self._free_at_s = max(self._free_at_s, now_s) + took_s
        return self._free_at_s
