"""What it costs to take a model off an instance: requests of the model that come meanwhile and are late for it.

Until the model is back, two loads and the other model's service of one request pass at the least (taken as long as its own), `away_s`. A
request that comes in that time waits for the end of it, unless other instances that have the model active can carry it:

    late = share * sum over keys of arrivals_per_s * max(0, away_s + own_s - SLO),  share = max(0, 1 - carried_per_s / arrivals_per_s)

`own_s`: from a request's start to what its SLO bounds, in the batch that the agent chose; `carried_per_s`: what the others serve in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qlm_core.request import SloKind
from qlm_planner.board.board import Board
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.order_cost import Floats


def leave_costs(board: Board, estimates: Estimates, slots: Sequence[Slot]) -> Floats:
    """[instances, models by their number], in the unit of the objective; 0 where nothing of a model is expected, or an instance does not
    serve it. Costs O(instances x keys)."""
    costs = np.zeros((len(slots), estimates.codes))
    for model, rates in board.expected.items():
        served = [estimates.service_of_all(slot, model) for slot in slots]
        here_per_s = [
            1.0 / service.work.mean if service is not None and slot.active_model == model else 0.0
            for slot, service in zip(slots, served, strict=True)
        ]
        carried_per_s, arrivals_per_s = sum(here_per_s), sum(rate.per_s for rate in rates)
        for number, (slot, service) in enumerate(zip(slots, served, strict=True)):
            hardware = estimates.hardware(slot.facts, model)
            share = 1.0 - (carried_per_s - here_per_s[number]) / arrivals_per_s
            if service is None or hardware is None or share <= 0.0:
                continue
            whole_s = service.prefill_s + service.output.mean * service.step_s
            away_s = 2.0 * hardware.swap_s(warm=True) + whole_s
            own_s = {SloKind.FIRST_TOKEN: service.prefill_s}
            late = sum(rate.per_s * max(0.0, away_s + own_s.get(rate.key.slo_kind, whole_s) - rate.slo_s) for rate in rates)
            costs[number, estimates.code(model)] = estimates.policy.late_weight * share * late
    return costs
