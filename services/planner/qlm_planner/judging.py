"""What whole plans cost, by the one model of queues: the judge of every plan before it replaces the one in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qlm_planner.board import Board
from qlm_planner.class_terms import ClassTerms, GroupColumns, serving
from qlm_planner.policy import Policy
from qlm_planner.terms import Engine
from qlm_planner.timeline import Columns, Cost, timelines

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

Target = dict[str, list[str]]
"""Group ids of each queue as they should be."""


def current(board: Board) -> Target:
    return {name: list(queue) for name, queue in board.queues.items()}


def plan_cost(board: Board, made: ClassTerms, now_s: float) -> Cost:
    """Predicted cost of the plan as it is, without groups that nobody serves."""
    return plan_costs(board, made, now_s, [board.queues])[0]


def plan_costs(board: Board, made: ClassTerms, now_s: float, plans: Sequence[Mapping[str, Sequence[str]]]) -> list[Cost]:
    """Of several orders of the same board, in one pass. Costs O(groups) for each."""
    slots = serving(board)
    names = [slot.facts.name for slot in slots]
    found = {group_id for plan in plans for name in names for group_id in plan.get(name, ())}
    # In the order of the board, so that equal plans give equal sums.
    groups = [group for group_id, group in board.groups.items() if group_id in found]
    columns = made.columns(groups)
    place = {group.group_id: number for number, group in enumerate(groups)}
    orders: list[int] = []
    bounds = [0]
    for plan in plans:
        for name in names:
            orders.extend([place[group_id] for group_id in plan.get(name, ())])
            bounds.append(len(orders))
    sizes = np.diff(bounds)
    on = np.tile(np.arange(len(slots), dtype=np.int64), len(plans)).repeat(sizes)
    engines = [made.estimates.engine(slot) for slot in slots] * len(plans)
    if not orders:
        return [Cost()] * len(plans)
    stand = columns.take(np.array(orders, dtype=np.int64))
    beside = _beside(engines, np.array([slot.running for slot in slots] * len(plans), dtype=np.float64), sizes, stand)
    rows = made.order_rows(slots, on, stand, beside)
    busy = [number for number, size in enumerate(sizes.tolist()) if size]
    worked_out = timelines([(engines[number], Columns(rows[:, bounds[number] : bounds[number + 1]])) for number in busy], now_s)
    costs = [Cost()] * len(plans)
    for number, timeline in zip(busy, worked_out, strict=True):
        costs[number // len(slots)] += timeline.cost
    return costs


def worth(policy: Policy, before: float, after: float) -> bool:
    """A plan replaces another only for a stated share of its cost, and a least gain: a change has a price of its own, and the figures are
    predictions. False for a cost that is no number."""
    return before - after > max(policy.replan_gain_min, policy.replan_gain * before)


def _beside(engines: Sequence[Engine], running: Floats, sizes: Integers, stand: GroupColumns) -> Floats:
    """Requests of each group's run, with those that run already where the active model serves it: they share the batch. Trying one place
    for one group can do without (`insertion`); a search over whole plans would put all that is urgent into one batch."""
    queue = np.repeat(np.arange(len(sizes)), sizes)
    fresh = np.ones(len(queue), dtype=np.bool_)
    fresh[1:] = (queue[1:] != queue[:-1]) | (stand.model[1:] != stand.model[:-1])
    run = np.cumsum(fresh) - 1
    total = np.bincount(run, weights=stand.count)
    first = np.flatnonzero(fresh)
    heads = np.r_[True, queue[first][1:] != queue[first][:-1]]
    active = np.array([engine.model_code for engine in engines])
    goes_on = heads & (stand.model[first] == active[queue[first]])
    total += np.where(goes_on, running[queue[first]], 0.0)
    found: Floats = total[run]
    return found
