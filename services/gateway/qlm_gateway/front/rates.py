"""Rates of API keys at one gateway: token buckets that hold a minute's worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qlm_core.vocabulary.errors import QueueFull
from qlm_process.identity.key_ring import RATE_LIMITED
from qlm_process.identity.keys import Key

MINUTE_S = 60.0
KEYS_MAX = 10_000
"""Most keys whose buckets are kept; of more, the one that was used the longest time ago begins with full ones."""


@dataclass(slots=True)
class _Bucket:
    """`level`: what may be used at `at_s`; below 0 after a prompt of more than was left."""

    level: float
    at_s: float

    def refill(self, per_min: float, now_s: float) -> None:
        self.level = min(per_min, self.level + per_min / MINUTE_S * max(0.0, now_s - self.at_s))
        self.at_s = now_s


class KeyRates:
    """`monotonic`: seconds of a clock that never goes back."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._buckets: dict[str, dict[str, _Bucket]] = {}

    def take(self, key: Key) -> None:
        """Counts a request that a key sends. Raises QueueFull RATE_LIMITED where its requests or prompt tokens of now are used up."""
        buckets = self._refilled(key)
        for name, bucket in buckets.items():
            if bucket.level < 1.0:
                per_min = key.rates[name]
                retry_s = (1.0 - bucket.level) / per_min * MINUTE_S
                raise QueueFull(
                    f"this API key has {name} of {per_min:g} at each gateway",
                    reason=RATE_LIMITED,
                    details={"bound": name, "limit": f"{per_min:g}", "retry_after_s": f"{retry_s:.3f}"},
                )
        if "requests_per_min" in buckets:
            buckets["requests_per_min"].level -= 1.0

    def charge(self, key: Key, prompt_tokens: int) -> None:
        """Counts the prompt of a request that was accepted."""
        if "prompt_tokens_per_min" in key.rates:
            self._refilled(key)["prompt_tokens_per_min"].level -= prompt_tokens

    def left(self, key: Key) -> dict[str, tuple[float, float, float]]:
        """By name of a rate: its bound, what is left of it now, and the seconds until it is whole again."""
        return {
            name: (key.rates[name], max(0.0, bucket.level), (key.rates[name] - bucket.level) / key.rates[name] * MINUTE_S)
            for name, bucket in self._refilled(key).items()
        }

    def _refilled(self, key: Key) -> dict[str, _Bucket]:
        if not key.rates:
            return {}
        now_s = self._monotonic()
        known = self._buckets.pop(key.id, {})
        buckets = self._buckets[key.id] = {name: known.get(name) or _Bucket(per_min, now_s) for name, per_min in key.rates.items()}
        if len(self._buckets) > KEYS_MAX:
            del self._buckets[next(iter(self._buckets))]
        for name, bucket in buckets.items():
            bucket.refill(key.rates[name], now_s)
        return buckets
