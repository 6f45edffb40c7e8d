"""What it costs that a model is not on an instance: requests of it that come meanwhile and are late for it.

A request that comes while its model is away waits for the end of that, unless other instances that have the model active can carry it:

    late = share * sum over keys of arrivals_per_s * max(0, away_s + own_s - SLO),  share = max(0, 1 - carried_per_s / arrivals_per_s)

`own_s`: from a request's start to what its SLO bounds, in the batch that the agent chose; `carried_per_s`: what the others serve in theirs.
A model that is not active is away until its first run of the order starts; without a run there, until the whole order has ended and it is
loaded. What is missed so is missed once, by the instances that lack the model in equal parts. The active one, where another is served
first, is away for two loads and the other model's service of one request at the least (taken as long as its own). How long a model stays
behind its first run nobody knows: those that come then join it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SLACKS = 8
"""Slacks of a model's requests that are told apart, each of as many arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Absences:
    """Of queues. `leave_cost` [queues]: of serving another model than the active one first, in the unit of the objective. Of models that
    are not active: `per_s` [queues, models, SLACKS]: cost of a second for which they are away beyond `slack_s`; `load_s`, `warm_s` [queues,
    models]: to load them from where they are now, and from host memory."""

    leave_cost: Floats
    per_s: Floats
    slack_s: Floats
    load_s: Floats
    warm_s: Floats

    @classmethod
    def none(cls, queues: int, models: int) -> Absences:
        """Where nothing is expected."""
        slacks, loads = np.zeros((queues, models, SLACKS)), np.zeros((queues, models))
        return cls(leave_cost=np.zeros(queues), per_s=slacks, slack_s=slacks.copy(), load_s=loads, warm_s=loads.copy())

    def take(self, queues: Sequence[int] | Integers) -> Absences:
        """Of some of them, in an order."""
        return Absences(**{each.name: getattr(self, each.name)[queues] for each in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Absences]) -> Absences:
        """Of all queues of some, one after the other."""
        return cls(**{each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)})

    def costs(self, queue: Integers, model: Integers, start_s: Floats, end_s: Floats) -> Floats:
        """Of the models that are not active [queues]: with runs of `model` on `queue` [runs] that start at `start_s`, and orders that
        end at `end_s` [queues], in seconds from now."""
        away_s = np.maximum(self.load_s, end_s[:, None] + self.warm_s)
        np.minimum.at(away_s, (queue, model), start_s)
        found: Floats = (self.per_s * np.maximum(0.0, away_s[:, :, None] - self.slack_s)).sum(axis=(1, 2))
        return found
