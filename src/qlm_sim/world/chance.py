"""Seeded chance. Each part of a run has a source of its own, so that a change in one does not move the others.

Only `random.Random.random` is used: of all its methods it alone is promised to give the same in every version of Python.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Chance:
    """A source of its own for one `name` of one seed."""

    def __init__(self, seed: int, name: str) -> None:
        self.seed = seed
        self._name = name
        self._random = random.Random(f"{seed}/{name}")

    def part(self, name: str) -> Chance:
        """Another source, for a part of this one's subject."""
        return Chance(self.seed, f"{self._name}/{name}")

    def level(self) -> float:
        """From 0 (included) to 1."""
        return self._random.random()

    def happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random.random()

    def below(self, count: int) -> int:
        """0 to count - 1."""
        return min(int(self._random.random() * count), count - 1)

    def whole(self, low: int, high: int) -> int:
        """low to high, both included."""
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def some(self, choices: Sequence[T], probability: float) -> list[T]:
        """Each with a probability, in their order."""
        return [choice for choice in choices if self.happens(probability)]

    def wait_s(self, mean_s: float) -> float:
        """Exponentially distributed."""
        return -mean_s * math.log1p(-self._random.random())
