"""The cost of absent models now (`absence`): by the expected demand and the active models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qlm_core.vocabulary.request import SloKind
from qlm_planner.board.board import Board
from qlm_planner.board.slot import Slot
from qlm_planner.cost.absence import SLACKS, Absences, Floats
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.order_cost import FAR_S


def absences_of(board: Board, estimates: Estimates, slots: Sequence[Slot]) -> Absences:
    """Absences on the queues of some instances; zero for models without demand, or not served there. O(instances x keys)."""
    codes = [estimates.code(model) for model in board.expected]
    found = Absences.none(len(slots), estimates.codes)
    late_weight = estimates.policy.late_weight
    for code, (model, rates) in zip(codes, board.expected.items(), strict=True):
        arrivals_per_s = np.array([rate.per_s for rate in rates])
        wanted_per_s = float(arrivals_per_s.sum())
        served = [estimates.service_of_all(slot, model) for slot in slots]
        here_per_s = [
            1.0 / service.work.mean if service is not None and slot.active_model == model else 0.0
            for slot, service in zip(slots, served, strict=True)
        ]
        carried_per_s = sum(here_per_s)
        lacking = sum(each is not None and slot.active_model != model for slot, each in zip(slots, served, strict=True))
        for number, (slot, service) in enumerate(zip(slots, served, strict=True)):
            hardware = estimates.hardware(slot.facts, model)
            share = 1.0 - (carried_per_s - here_per_s[number]) / wanted_per_s
            if service is None or hardware is None or share <= 0.0:
                continue
            whole_s = service.prefill_s + service.output.mean * service.step_s
            own_s = {SloKind.FIRST_TOKEN: service.prefill_s}
            slack_s = np.array([rate.slo_s - own_s.get(rate.key.slo_kind, whole_s) for rate in rates])
            cost_per_s = late_weight * share * arrivals_per_s
            if slot.active_model == model:
                away_s = 2.0 * hardware.swap_s(warm=True) + whole_s
                found.leave_cost[number] = cost_per_s @ np.maximum(0.0, away_s - slack_s)
            else:
                found.per_s[number, code], found.slack_s[number, code] = _binned(cost_per_s / lacking, slack_s)
                found.load_s[number, code] = hardware.swap_s(warm=model in slot.warm_models)
                found.warm_s[number, code] = hardware.swap_s(warm=True)
    return found


def _binned(per_s: Floats, slack_s: Floats) -> tuple[Floats, Floats]:
    """Divides keys into SLACKS parts of equal cost, by slack: the cost per second and the mean slack of each. Requests that are never late
    are in the last parts, with FAR_S."""
    turn = np.argsort(slack_s, kind="stable")
    per_s, slack_s = per_s[turn], np.minimum(slack_s[turn], FAR_S)
    part = ((np.cumsum(per_s) - 0.5 * per_s) * SLACKS / per_s.sum()).astype(np.int64)
    each = np.bincount(part, per_s, SLACKS).astype(np.float64)
    return each, np.bincount(part, per_s * slack_s, SLACKS) / np.maximum(each, np.finfo(float).tiny)
