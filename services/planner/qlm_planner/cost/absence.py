"""The cost of an absent model: expected requests for it that are late because it is not on an instance.

A request waits for the end of its model's absence, unless other instances with the model active can carry it:

    late = share * sum over keys of arrivals_per_s * max(0, away_s + own_s - SLO),  share = max(0, 1 - carried_per_s / arrivals_per_s)

`own_s`: from a request's start to the event that its SLO bounds, in the agent's batch; `carried_per_s`: the other instances' throughput.
An inactive model is away until its first run starts, or, without a run, until the order has ended and the model is loaded; instances that
lack it share its misses equally. The active model, if another is served first, is away for two loads and the service of one request of the
other model (taken as long as its own). Requests that arrive after a model's first run are taken to join it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
SLACKS = 8
"""Slacks of a model's requests, each for an equal part of the cost."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Absences:
    """Absences on queues. `leave_cost` [queues]: cost of serving another model before the active one. Of inactive models: `per_s` [queues,
    models, SLACKS]: cost of a second of absence beyond `slack_s`; `load_s`, `warm_s` [queues, models]: load times from the model's place
    now and from host memory."""

    leave_cost: Floats
    per_s: Floats
    slack_s: Floats
    load_s: Floats
    warm_s: Floats

    @classmethod
    def none(cls, queues: int, models: int) -> Absences:
        """No expected requests."""
        slacks, loads = np.zeros((queues, models, SLACKS)), np.zeros((queues, models))
        return cls(leave_cost=np.zeros(queues), per_s=slacks, slack_s=slacks.copy(), load_s=loads, warm_s=loads.copy())

    def take(self, queues: Sequence[int] | Integers) -> Absences:
        """The absences of some queues, in order."""
        return Absences(**{each.name: getattr(self, each.name)[queues] for each in fields(self)})

    @classmethod
    def concatenate(cls, parts: Sequence[Absences]) -> Absences:
        """The queues of all parts, one part after the other."""
        return cls(**{each.name: np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)})

    def costs(self, queue: Integers, model: Integers, start_s: Floats, end_s: Floats) -> Floats:
        """The cost of inactive models [queues], for runs of `model` on `queue` [runs] from `start_s` and orders until `end_s` [queues], in
        seconds from now."""
        away_s = np.maximum(self.load_s, end_s[:, None] + self.warm_s)
        np.minimum.at(away_s, (queue, model), start_s)
        found: Floats = (self.per_s * np.maximum(0.0, away_s[:, :, None] - self.slack_s)).sum(axis=(1, 2))
        return found
