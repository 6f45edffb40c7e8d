"""Demand: arrivals per second of each group key, by times of acceptance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from qlm_core.vocabulary.group import GroupKey, group_key
from qlm_core.vocabulary.request import RequestFacts

MEMORY_S = 120.0
"""Arrivals of this age weigh 1/e."""
WATCHED_MIN_S = 10.0
"""Least time over which arrivals are averaged."""
KEYS_MAX = 500
"""Most keys; the least frequent half is dropped beyond."""


@dataclass(slots=True)
class Stream:
    """One key. `count`, `prompt_tokens`: decayed to `seen_s`. `slo_s`: the shortest SLO."""

    seen_s: float
    slo_s: float
    priority: int
    count: float = 0.0
    prompt_tokens: float = 0.0

    def fade(self, now_s: float) -> None:
        kept = math.exp(min(0.0, self.seen_s - now_s) / MEMORY_S)
        self.count *= kept
        self.prompt_tokens *= kept
        self.seen_s = max(self.seen_s, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """`per_s`: requests per second. `prompt_tokens`: mean per request. `slo_s`: infinite for PRIORITY."""

    key: GroupKey
    slo_s: float
    priority: int
    per_s: float
    prompt_tokens: float


@dataclass(slots=True)
class Demand:
    """Counts arrivals from `began_s`; requests accepted earlier are backlog, not demand."""

    began_s: float
    streams: dict[GroupKey, Stream] = field(default_factory=dict)

    def record(self, arrivals: Iterable[RequestFacts]) -> None:
        """Counts arrivals. O(1) each."""
        for facts in arrivals:
            if facts.accepted_s < self.began_s:
                continue
            key = group_key(facts)
            stream = self.streams.get(key)
            if stream is None:
                if len(self.streams) >= KEYS_MAX:
                    self._forget(facts.accepted_s)
                stream = self.streams[key] = Stream(facts.accepted_s, facts.slo.seconds, facts.slo.priority)
            stream.fade(facts.accepted_s)
            stream.count += 1.0
            stream.prompt_tokens += facts.prompt_tokens
            stream.slo_s = min(stream.slo_s, facts.slo.seconds)

    def rates(self, now_s: float) -> list[Rate]:
        """The current rates, sorted by key."""
        watched_s = max(WATCHED_MIN_S, now_s - self.began_s)
        weight_s = MEMORY_S * -math.expm1(-watched_s / MEMORY_S)
        for stream in self.streams.values():
            stream.fade(now_s)
        return [
            Rate(
                key=key,
                slo_s=stream.slo_s,
                priority=stream.priority,
                per_s=stream.count / weight_s,
                prompt_tokens=stream.prompt_tokens / stream.count,
            )
            for key, stream in sorted(self.streams.items())
            if stream.count > 0.0
        ]

    def by_model(self, now_s: float) -> dict[str, list[Rate]]:
        """The rates by model."""
        found: dict[str, list[Rate]] = {}
        for rate in self.rates(now_s):
            found.setdefault(rate.key.model, []).append(rate)
        return found

    def _forget(self, now_s: float) -> None:
        """Drops the least frequent half."""
        for stream in self.streams.values():
            stream.fade(now_s)
        kept = sorted(self.streams, key=lambda key: (-self.streams[key].count, key))[: KEYS_MAX // 2]
        self.streams = {key: self.streams[key] for key in kept}
