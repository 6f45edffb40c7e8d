"""What an operation is asked and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from qlm_core.distribution import Normal
from qlm_core.profile import HardwareProfile
from qlm_core.request import SloKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Requests of one class that an instance serves, or would. `slo_s`: the shortest SLO that the class may have, infinite for none."""

    model: str
    slo_kind: SloKind
    slo_s: float
    prompt_tokens: float
    output: Normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What serves them: a batch of at most `batch_max` on an engine of these figures. The terms follow from it (work, KV, swap times)."""

    hardware: HardwareProfile
    batch_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an agent does while such requests are at its head or run. `batch_max`: it pulls no more than that many at a time."""

    batch_max: int


class Operation(Protocol):
    """One LSO. Pure; the same arguments give the same answers in every process."""

    @property
    def name(self) -> str:
        """In the settings."""

    def applies(self, situation: Situation, means: Means) -> bool:
        """Whether it is carried out for such requests."""

    def effect(self, situation: Situation, means: Means) -> Means:
        """Where it applies: what serves them then, as the planner predicts it."""

    def limits(self, situation: Situation, means: Means) -> Limits:
        """Where it applies: what the agent does."""


def effect_of(operations: Sequence[Operation], situation: Situation, means: Means) -> Means:
    """What serves a class with all operations that apply, one after the other."""
    for operation in operations:
        if operation.applies(situation, means):
            means = operation.effect(situation, means)
    return means


def limits_of(operations: Sequence[Operation], situations: Sequence[Situation], means: Means) -> Limits:
    """What an agent keeps to with requests of these classes: the tightest of all that apply."""
    batch_max = int(means.batch_max)
    for situation in situations:
        for operation in operations:
            if operation.applies(situation, means):
                batch_max = min(batch_max, operation.limits(situation, means).batch_max)
    return Limits(batch_max=max(1, batch_max))


def shortest_slo_s(slo_class: str) -> float:
    """The SLO that all of a class exceed ("32s" is for more than 16 s); infinite for a class that is no time."""
    text = slo_class.removesuffix("s")
    if text == slo_class:
        return math.inf
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1) / 2.0
    except (ValueError, ZeroDivisionError):
        return math.inf
