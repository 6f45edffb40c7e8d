"""The exact optimum over all subsets of devices: HELR (UELLM, algorithm 2), corrected.

The print as it stands computes nothing of use. This program instead:

- Line 5 skips a subset whose memory is *more* than M. A subset is skipped if it does not hold the model (equation 4).
- dp[i][j] in line 14 and equation 5 has two devices as its index, while dp is declared over (mark, device). The recurrence is that of Held
  and Karp (1962): dp[S + j][j] = min over i in S of dp[S][i] + hop(i, j), from dp[{i}][i] = 0.
- Line 13 gives each device min(Layer(M), room) layers, so a map holds the model several times. Layers are given in order of speed, and each
  device takes from those that remain; each stage has one at least.
- Their times depend on the subset alone, so they are added once and not along the path (lines 14 and 16 add them twice).
- Line 16 adds the links to *all* devices to the end of the path. The path already has its links, and nothing follows it.
- p and the performance of a device are one figure: milliseconds a layer.
- a1 and a2 occur in no equation: `objective.Weights` defines them.
"""

from __future__ import annotations

import numpy as np

from qlm_deploy.objective import Found, Weights, floor_of
from qlm_deploy.stages import Floats, Ints, Problem, filled

EXACT_DEVICES_MAX = 12
"""2^n subsets of n^2 steps each."""
SCORE_DIGITS = 12
"""Scores that agree so far are equal: the lower latency decides, then the fewer devices, then the devices that stand first."""


def best_exact(problem: Problem, weights: Weights) -> Found | None:
    """The map of the least objective; None where no path of linked devices holds the model."""
    count = len(problem.capacity)
    assert count <= EXACT_DEVICES_MAX
    members = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1 == 1
    sizes = members.sum(axis=1)
    links_ms = shortest_paths(problem.hop_ms, sizes)
    latency_ms = filled(problem, members)[1] + links_ms.min(axis=1)
    if not np.isfinite(latency_ms).any():
        return None
    score = np.round(floor_of(problem).score(weights, latency_ms, sizes), SCORE_DIGITS)
    best = int(np.lexsort((sizes, latency_ms, score))[0])
    return Found(path=_path(problem.hop_ms, links_ms, best), gap=0.0)


def shortest_paths(hop_ms: Floats, sizes: Ints) -> Floats:
    """Shortest path through all devices of a subset that ends at a device: (subsets, devices), infinite where there is none."""
    count = len(hop_ms)
    paths = np.full((1 << count, count), np.inf)
    paths[1 << np.arange(count), np.arange(count)] = 0.0
    for size in range(1, count):
        subsets = np.flatnonzero(sizes == size)
        for device in range(count):
            without = subsets[(subsets >> device) & 1 == 0]
            paths[without | (1 << device), device] = (paths[without] + hop_ms[:, device]).min(axis=1)
    return paths


def _path(hop_ms: Floats, paths: Floats, subset: int) -> tuple[int, ...]:
    """Back from the end of the shortest path; the direction that starts at the lower device."""
    device = int(np.argmin(paths[subset]))
    found = [device]
    while subset := subset & ~(1 << device):
        device = int(np.argmin(paths[subset] + hop_ms[:, device]))
        found.append(device)
    return tuple(found if found[0] < found[-1] else found[::-1])
