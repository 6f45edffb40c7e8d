"""The objective of a deployer: a1 x latency + a2 x devices, each over its least possible value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qlm_deploy.stages import Floats, Ints, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """UELLM names a1 and a2 in the text of section 4.3 only. Here a1 weighs latency and a2 the number of devices: one token computes on
    one device at a time, so each further device lowers mean utilisation."""

    latency: float
    devices: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best map of a search: devices in the order of their stages. `gap`: how far at most its objective lies above the optimum, as a
    share; 0 where the search is exact."""

    path: tuple[int, ...]
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Least values over all maps, links and connections ignored: they make the terms of an objective comparable, and bound a search."""

    compute_ms: float
    devices: int
    hop_ms: float

    def score(self, weights: Weights, latency_ms: Floats, devices: Ints) -> Floats:
        if weights.latency == 0.0:
            return np.where(np.isfinite(latency_ms), weights.devices * devices / self.devices, np.inf)
        return weights.latency * latency_ms / self.compute_ms + weights.devices * devices / self.devices

    def bound(self, weights: Weights, devices: int) -> float:
        """No map of `devices` or more scores less."""
        count = max(devices, self.devices)
        latency_ms = self.compute_ms + (count - 1) * self.hop_ms
        return float(self.score(weights, np.array([latency_ms]), np.array([count]))[0])


def floor_of(problem: Problem) -> Floor:
    """For devices that together hold the model. Compute: the fastest devices filled. Devices: the largest filled."""
    order = problem.by_speed
    before = np.cumsum(problem.capacity[order]) - problem.capacity[order]
    layers = np.minimum(problem.capacity[order], np.maximum(problem.layers - before, 0))
    largest = np.cumsum(-np.sort(-problem.capacity))
    hops = problem.hop_ms[np.isfinite(problem.hop_ms)]
    return Floor(
        compute_ms=float(layers @ problem.layer_ms[order]),
        devices=int(np.searchsorted(largest, problem.layers)) + 1,
        hop_ms=float(hops.min()) if hops.size else 0.0,
    )
