"""A search for more devices than the exact one takes: paths grow by one linked device at a time, and the best `BEAM_WIDTH` go on."""

from __future__ import annotations

import numpy as np

from qlm_deploy.objective import Found, Weights, floor_of
from qlm_deploy.stages import Bools, Floats, Ints, Problem, filled

BEAM_WIDTH = 128


def best_by_beam(problem: Problem, weights: Weights) -> Found | None:
    """The best map that it meets, with a bound on its distance from the optimum (`Found.gap`, against `Floor.bound`); None where it meets
    none. At most devices x BEAM_WIDTH paths are judged a step, and as many steps are made as there are devices or layers. A path ends
    where its links alone make every longer one worse than the best."""
    count = len(problem.capacity)
    if problem.capacity.sum() < problem.layers:
        return None
    floor = floor_of(problem)
    paths = np.flatnonzero(problem.capacity > 0)[:, None]
    links_ms = np.zeros(len(paths))
    best: tuple[float, float, tuple[int, ...]] | None = None
    for length in range(1, min(count, problem.layers) + 1):
        members = np.zeros((len(paths), count), dtype=np.bool_)
        members[np.arange(len(paths))[:, None], paths] = True
        latency_ms = filled(problem, members)[1] + links_ms
        score = floor.score(weights, latency_ms, np.full(len(paths), length))
        first = int(np.lexsort((latency_ms, score))[0])
        if np.isfinite(score[first]) and (best is None or (score[first], latency_ms[first]) < best[:2]):
            best = float(score[first]), float(latency_ms[first]), tuple(int(device) for device in paths[first])
        if best is not None:
            least_ms = floor.compute_ms + links_ms + floor.hop_ms
            open_ = floor.score(weights, least_ms, np.full(len(paths), length + 1)) < best[0]
            paths, links_ms, members, latency_ms = paths[open_], links_ms[open_], members[open_], latency_ms[open_]
        if not len(paths):
            break
        expected_ms, needed = _expected(problem, members)
        guess = floor.score(weights, np.fmin(latency_ms, expected_ms + links_ms + needed * floor.hop_ms), length + needed)
        kept = np.lexsort((links_ms, expected_ms + links_ms, guess))[:BEAM_WIDTH]
        paths, links_ms = _grown(problem, paths[kept], links_ms[kept], members[kept])
        if not len(paths):
            break
    if best is None:
        return None
    bound = floor.bound(weights, 1)
    return Found(path=best[2], gap=max(0.0, best[0] / bound - 1.0))


def _expected(problem: Problem, members: Bools) -> tuple[Floats, Ints]:
    """For each set: compute time if its devices are full and the fastest others take the rest, and how many of the largest others hold
    that rest. A guide, no bound."""
    held = members * problem.capacity
    rest = np.maximum(problem.layers - held.sum(axis=1), 0)
    total = np.where(rest > 0, held @ problem.layer_ms, filled(problem, members)[1])
    left = rest.copy()
    for device in problem.by_speed:
        more = np.where(members[:, device], 0, np.minimum(left, problem.capacity[device]))
        total = total + more * problem.layer_ms[device]
        left = left - more
    needed = np.zeros_like(rest)
    for device in np.argsort(-problem.capacity, kind="stable"):
        takes = ~members[:, device] & (rest > 0)
        needed += takes
        rest = np.where(takes, np.maximum(rest - problem.capacity[device], 0), rest)
    return total, needed


def _grown(problem: Problem, paths: Ints, links_ms: Floats, members: Bools) -> tuple[Ints, Floats]:
    """Each path with each linked device that it lacks; of paths over the same devices with the same end, the shortest."""
    longer_ms = np.where(members | (problem.capacity < 1), np.inf, links_ms[:, None] + problem.hop_ms[paths[:, -1]])
    rows, ends = np.nonzero(np.isfinite(longer_ms))
    reached = members[rows]
    reached[np.arange(len(rows)), ends] = True
    keys = np.column_stack((np.packbits(reached, axis=1).astype(np.int64), ends))
    order = np.argsort(longer_ms[rows, ends], kind="stable")
    unique = order[np.unique(keys[order], axis=0, return_index=True)[1]]
    return np.column_stack((paths[rows[unique]], ends[unique])), longer_ms[rows[unique], ends[unique]]
