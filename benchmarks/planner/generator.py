"""Planning problems by a seed: queues of groups as they stand on a cluster under load, over the whole range of what may come."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlm_planner.search import Problem, Weights

Floats = NDArray[np.float64]

SLOS_S = (20.0, 60.0, 300.0, 3600.0)
"""Interactive, two of batch, and an hour (QLM section 8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A problem to be drawn. `tightness`: work over what the instances do until the middle deadline; above 1 not all can be in time.
    `kinds`: of GPUs, of different speeds; `partial`: share of pairs of a kind and a model that do not go together. `noise`: deviation of a
    group's work over its mean."""

    groups: int
    queues: int
    models: int
    tightness: float = 1.0
    kinds: int = 2
    partial: float = 0.0
    bands: int = 1
    noise: float = 0.15
    requests: tuple[int, int] = (40, 400)
    heads: bool = True


def drawn(seed: int, shape: Shape, weights: Weights | None = None) -> Problem:
    """The problem of a seed. Models are requested by a power law; deadlines lie within what the work takes, times a class of SLO."""
    chance = np.random.default_rng((seed, shape.groups, shape.queues, shape.models))
    groups, queues, models, kinds = shape.groups, shape.queues, shape.models, min(shape.kinds, shape.queues)
    popularity = 1.0 / np.arange(1, models + 1) ** chance.uniform(0.3, 1.5)
    model = chance.choice(models, size=groups, p=popularity / popularity.sum()).astype(np.int32)
    count = np.floor(np.exp(chance.uniform(math.log(shape.requests[0]), math.log(shape.requests[1] + 1), groups)))
    speed = np.sort(chance.uniform(1.0, 3.0, kinds))
    size = np.exp(chance.normal(0.0, 0.7, models))
    request_s = 0.05 * size[model] * np.exp(chance.normal(0.0, 0.4, groups))
    work_s = count * request_s / speed[:, None]
    own_s = np.exp(chance.normal(math.log(6.0), 0.5, groups)) * np.sqrt(size[model]) / speed[:, None]
    cold_s = chance.uniform(8.0, 40.0) * np.sqrt(size) * chance.uniform(0.7, 1.3, (kinds, models))
    fits = chance.random((kinds, models)) >= shape.partial
    fits[-1] = True
    work_s = np.where(fits[:, model], work_s, math.inf)
    kind = np.sort(chance.integers(0, kinds, queues)).astype(np.int32)
    kind[-1] = kinds - 1
    horizon_s = np.where(np.isfinite(work_s), work_s, 0.0).max(axis=0).sum() / queues + cold_s.mean()
    spans = chance.uniform(0.0, 2.0, groups) * chance.choice([0.2, 1.0, 3.0], groups)
    slo_s = np.asarray(SLOS_S)[chance.integers(0, len(SLOS_S), groups)]
    deadline_s = spans * horizon_s / max(shape.tightness, 1e-6) + own_s.min(axis=0)
    active = np.where(chance.random(queues) < 0.8, chance.integers(0, models, queues), -1).astype(np.int32)
    active = np.where((active >= 0) & ~fits[kind, active], -1, active).astype(np.int32)
    drain_lead_s = np.where(active >= 0, chance.uniform(0.0, 20.0, queues), 0.0)
    band = chance.integers(0, shape.bands, groups).astype(np.int32)
    head = _heads(chance, shape, model, band, active)
    leave_cost = chance.uniform(0.0, 2_000.0, queues)
    return Problem(
        model=model,
        band=band,
        count=count,
        deadline_s=deadline_s,
        spread_s=chance.uniform(0.0, 0.2, groups) * slo_s,
        slo_s=np.maximum(slo_s, deadline_s),
        weight=np.ones(groups),
        work_s=work_s,
        work_variance=(shape.noise * np.where(np.isfinite(work_s), work_s, 0.0)) ** 2,
        own_s=own_s,
        own_variance=(0.5 * own_s) ** 2 * (shape.noise > 0),
        drain_s=own_s * 1.2,
        cold_s=cold_s,
        warm_s=0.25 * cold_s,
        kind=kind,
        active=active,
        lead_s=0.2 * drain_lead_s,
        lead_variance=(0.05 * drain_lead_s * (shape.noise > 0)) ** 2,
        drain_lead_s=drain_lead_s,
        drain_lead_variance=(0.2 * drain_lead_s * (shape.noise > 0)) ** 2,
        warm=chance.random((queues, models)) < 0.3,
        head=head,
        clear_cost=chance.uniform(50.0, 500.0, queues),
        leave_cost=np.where(active >= 0, leave_cost, 0.0),
        weights=weights or Weights(),
    )


def _heads(
    chance: np.random.Generator, shape: Shape, model: NDArray[np.int32], band: NDArray[np.int32], active: NDArray[np.int32]
) -> NDArray[np.int32]:
    """The groups served now: a group of the active model of the first band, each of one queue at the most."""
    head = np.full(shape.queues, -1, dtype=np.int32)
    taken: set[int] = set()
    for queue in range(shape.queues):
        found = [
            int(group) for group in np.flatnonzero((model == active[queue]) & (band == band.min(initial=0))) if int(group) not in taken
        ]
        if shape.heads and found:
            head[queue] = found[int(chance.integers(0, len(found)))]
            taken.add(int(head[queue]))
    return head
