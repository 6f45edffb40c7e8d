"""When to try again. Pure: randomness is passed in."""

from __future__ import annotations

from collections.abc import Callable

from qlm.errors import CallDeadlineExceeded, GatewayFull, QlmError, Unavailable

BACKOFF_FIRST_S = 0.05
DOUBLINGS_MAX = 32


def may_retry(error: QlmError) -> bool:
    """Whether another attempt, perhaps at another gateway, can go better: nothing was said about the request itself."""
    return isinstance(error, (Unavailable, CallDeadlineExceeded, GatewayFull))


class Backoff:
    """Pauses between attempts without progress: none until each address was tried, then doubling from `BACKOFF_FIRST_S`, not below what a
    server asks for, up to `max_s`; half of it random."""

    def __init__(self, *, attempts_max: int, max_s: float, addresses: int, random: Callable[[], float]) -> None:
        self._attempts_max = attempts_max
        self._max_s = max_s
        self._addresses = addresses
        self._random = random
        self.failures = 0

    def progress(self) -> None:
        """Notes an answer: the next failure is the first again."""
        self.failures = 0

    def next_pause_s(self, error: QlmError) -> float:
        """Seconds to wait before the next attempt. Raises the error itself where none is left, or where none can help."""
        if not may_retry(error) or self.failures >= self._attempts_max:
            raise error
        self.failures += 1
        if self.failures < self._addresses:
            return 0.0
        pause_s = BACKOFF_FIRST_S * 2.0 ** min(self.failures - self._addresses, DOUBLINGS_MAX)
        pause_s = min(self._max_s, max(pause_s, error.retry_after_s or 0.0))
        return pause_s * (0.5 + 0.5 * self._random())
