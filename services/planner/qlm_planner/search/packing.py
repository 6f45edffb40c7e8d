"""A problem as the compiled functions read it: adjacent figures in adjacent memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlm_planner.cost.order_cost import FAR_S
from qlm_planner.search.problem import Booleans, Floats, Integers, Problem

(WORK, WORK_VARIANCE, OWN, OWN_VARIANCE, DRAIN) = range(5)
"""Columns of a group on a kind."""
(REQUESTS, DEADLINE, SPREAD) = range(3)
"""Columns of a group: weighted requests; the first deadline, and the spread to the last."""
(LEAD, LEAD_VARIANCE, DRAIN_LEAD, DRAIN_LEAD_VARIANCE, CLEAR_COST, LEAVE_COST) = range(6)
"""Columns of a queue."""
(LATE, TARDINESS, WORK_WEIGHT, COMPLETION) = range(4)
"""Weights."""


class Packed(NamedTuple):
    """`on_kind` [K, G, 5], `group` [G, 3], `queue` [Q, 6], `swap` [Q, M], `warm` [K, M], `weights` [4]; `serves` [K, G]."""

    on_kind: Floats
    group: Floats
    model: Integers
    band: Integers
    serves: Booleans
    queue: Floats
    kind: Integers
    active: Integers
    head: Integers
    swap: Floats
    warm: Floats
    weights: Floats


def packed(problem: Problem) -> Packed:
    """Packs a problem into arrays of its own, for another thread."""
    weights = problem.weights
    on_kind = np.stack((problem.work_s, problem.work_variance, problem.own_s, problem.own_variance, problem.drain_s), axis=2)
    swap_s = np.maximum(problem.cold_s, problem.warm_s)
    serves = np.isfinite(on_kind).all(axis=2) & np.isfinite(swap_s)[:, problem.model]
    on_kind[~serves] = 0.0
    requests = problem.count * problem.weight
    deadline = np.minimum(problem.deadline_s, FAR_S)
    kind = problem.kind.astype(np.int32)
    swap = np.where(problem.warm, problem.warm_s[kind], swap_s[kind])
    return Packed(
        on_kind=np.ascontiguousarray(on_kind),
        group=_columns(requests, deadline, np.minimum(problem.spread_s, FAR_S)),
        model=problem.model.astype(np.int32),
        band=problem.band.astype(np.int32),
        serves=np.ascontiguousarray(serves),
        queue=_columns(
            problem.lead_s,
            problem.lead_variance,
            problem.drain_lead_s,
            problem.drain_lead_variance,
            problem.clear_cost,
            problem.leave_cost,
        ),
        kind=kind,
        active=problem.active.astype(np.int32),
        head=problem.head.astype(np.int32),
        swap=np.minimum(swap, FAR_S),
        warm=np.minimum(problem.warm_s, FAR_S),
        weights=np.array([weights.late, weights.tardiness, weights.work, weights.completion], dtype=np.float64),
    )


def _columns(*columns: NDArray[np.float64]) -> Floats:
    return np.ascontiguousarray(np.stack(columns, axis=1), dtype=np.float64)
