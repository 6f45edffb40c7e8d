"""What orders cost, in parts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qlm_planner import order_cost as of
from qlm_planner.solver.packing import DEADLINE, DRAIN, OWN, OWN_VARIANCE, REQUESTS, SPREAD, WORK, WORK_VARIANCE, Packed
from qlm_planner.solver.problem import Costs, Floats, Integers, Weights


def evaluated(packed: Packed, first: NDArray[np.int64], groups: Integers, weights: Weights) -> tuple[Costs, Floats]:
    """The cost of orders that fit and are valid, with no group where it cannot be served; and of each group [G, 2] the share of its
    requests that is expected to be late, and by how many seconds the latest is on average. Groups on no queue are late for ever."""
    queue = np.arange(len(packed.kind)).repeat(np.diff(first))
    model = packed.model[groups]
    rows = np.zeros((of.GROUP_ROWS, len(groups)))
    on_kind, group = packed.on_kind[packed.kind[queue], groups], packed.group[groups]
    rows[[of.WORK, of.WORK_VARIANCE, of.OWN, of.OWN_VARIANCE, of.DRAIN]] = on_kind[:, [WORK, WORK_VARIANCE, OWN, OWN_VARIANCE, DRAIN]].T
    rows[[of.REQUESTS, of.DEADLINE, of.SPREAD]] = group[:, [REQUESTS, DEADLINE, SPREAD]].T
    rows[of.SWAP], rows[of.WARM] = packed.swap[queue, model], packed.warm[packed.kind[queue], model]
    rows[of.MODEL], rows[of.BAND] = model, packed.band[groups]
    # -1, no head, takes what is appended.
    head_model, head_band = np.append(packed.model, -1)[packed.head], np.append(packed.band, 0)[packed.head]
    engines = np.concatenate((packed.queue.T, [packed.active, head_model, head_band]))
    times = of.order_times(rows, queue, engines, weights)
    each = np.ones((len(packed.model), 2))
    each[:, 1] = np.inf
    each[groups] = np.array((times.late, times.latest_s - rows[of.DEADLINE])).T
    return times.costs(), each
