"""What whole plans cost: the judge of every plan before it replaces the one in force."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from qlm_planner.board import Board
from qlm_planner.class_terms import ClassTerms, serving
from qlm_planner.order_cost import QUEUE_ROWS, order_times
from qlm_planner.policy import Policy
from qlm_planner.queues import crowd_of, engine_row
from qlm_planner.search.problem import Costs

Target = dict[str, list[str]]
"""Group ids of each queue as they should be."""


def current(board: Board) -> Target:
    return {name: list(queue) for name, queue in board.queues.items()}


def plan_cost(board: Board, made: ClassTerms, now_s: float) -> Costs:
    """Predicted cost of the plan as it is, without groups that nobody serves."""
    return plan_costs(board, made, now_s, [board.queues])[0]


def plan_costs(board: Board, made: ClassTerms, now_s: float, plans: Sequence[Mapping[str, Sequence[str]]]) -> list[Costs]:
    """Of several orders of the same board, in one pass. Costs O(groups) for each."""
    slots = serving(board)
    if not slots:
        return [Costs()] * len(plans)
    names = [slot.facts.name for slot in slots]
    found = {group_id for plan in plans for name in names for group_id in plan.get(name, ())}
    # In the order of the board, so that equal plans give equal sums.
    groups = [group for group_id, group in board.groups.items() if group_id in found]
    columns = made.columns(groups)
    place = {group.group_id: number for number, group in enumerate(groups)}
    queues = [plan.get(name, ()) for plan in plans for name in names]
    orders = np.array([place[group_id] for queue in queues for group_id in queue], dtype=np.int64)
    queue = np.arange(len(queues)).repeat([len(each) for each in queues])
    crowd = crowd_of(slots, columns.count)
    rows = made.rows(slots, queue % len(slots), columns.take(orders), crowd, now_s)
    heads = [engine_row(made.estimates, slot, board.queue_groups(name), crowd) for slot, name in zip(slots, names, strict=True)]
    engines = np.tile(np.array(heads).reshape(len(slots), QUEUE_ROWS).T, len(plans))
    times = order_times(rows, queue, engines, made.estimates.weights)
    return [times.costs(slice(number * len(slots), (number + 1) * len(slots))) for number in range(len(plans))]


def worth(policy: Policy, before: float, after: float) -> bool:
    """A plan replaces another only for a stated share of its cost, and a least gain: a change has a price of its own, and the figures are
    predictions. False for a cost that is no number."""
    return before - after > max(policy.replan_gain_min, policy.replan_gain * before)
