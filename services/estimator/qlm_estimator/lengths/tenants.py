"""Learns how much longer a tenant's answers are, in their sum, than the length model says: a factor, beside that of all tenants.

The length model aims at a median, and a wait is a sum of outputs. Where one tenant in a hundred sends answers of thousands of tokens,
medians say little of that sum: tenants differ in their tails. So what a tenant's requests made is set against what the model said of
them. Where there is one tenant its factor is one. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qlm_core.length_features import ANCHOR_TOKENS

MEMORY = 300.0
"""Finished requests of a tenant after which an old one weighs 1 / e."""
PRIOR_SAMPLES = 3.0
"""Requests that are as those of all tenants, beside a tenant's own."""
OUTLIER_FACTOR = 8.0
"""An output longer than so many times what the model said counts as so long."""
TENANTS_MAX = 4_096
"""Tenants of a served model: of more, the one that was not heard of for the longest goes first."""


@dataclass(slots=True)
class _Sums:
    """Faded: finished requests, tokens that they made, and tokens that the model said of them."""

    samples: float = 0.0
    made: float = 0.0
    said: float = 0.0

    def add(self, made: float, said: float) -> None:
        kept = 1.0 - 1.0 / MEMORY
        self.samples = kept * self.samples + 1.0
        self.made = kept * self.made + min(made, OUTLIER_FACTOR * said)
        self.said = kept * self.said + said

    def factor(self, of_all: float) -> float:
        prior = PRIOR_SAMPLES * self.said / self.samples
        return (self.made + prior * of_all) / (self.said + prior) / of_all


@dataclass(slots=True)
class TenantFactors:
    """Of the tenants of one served model, by their features. Empty, or as restored."""

    _sums: dict[int, _Sums] = field(default_factory=dict)

    def restore(self, feature: int, factor: float, samples: float) -> None:
        """A tenant as published: its factor and the finished requests that it rests on."""
        if samples > 0.0:
            said = samples * ANCHOR_TOKENS
            self._sums[feature] = _Sums(samples, factor * said, said)

    def learn(self, feature: int, said_tokens: float, output_tokens: float) -> None:
        """One finished request of a tenant, and what the model said of it."""
        sums = self._sums.pop(feature, None) or _Sums()
        sums.add(output_tokens, said_tokens)
        self._sums[feature] = sums  # the last in order is the newest
        while len(self._sums) > TENANTS_MAX:
            del self._sums[next(iter(self._sums))]

    def published(self) -> Mapping[int, tuple[float, float]]:
        """Factor and finished requests by feature."""
        said = sum(sums.said for sums in self._sums.values())
        of_all = sum(sums.made for sums in self._sums.values()) / said if said > 0.0 else 1.0
        return {feature: (sums.factor(of_all), sums.samples) for feature, sums in self._sums.items()}
