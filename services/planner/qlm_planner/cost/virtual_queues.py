"""The virtual queues of the instances that serve, as `order_cost` takes them, and what whole plans cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import Engine, Estimates
from qlm_planner.cost.order_cost import ACTIVE, LEAD, MODEL, QUEUE_ROWS, WORK, Floats, OrderTimes, order_times
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.search.problem import Costs


@dataclass(slots=True, kw_only=True)
class Line:
    """One virtual queue: `groups` in its order, the same as `rows` of `order_cost`, and its column there (`engine`). `crowd`: requests that
    an instance has on average."""

    slot: Slot
    groups: list[Group]
    rows: Floats
    engine: tuple[float, ...]
    crowd: float
    leaving: Floats

    @property
    def work_s(self) -> float:
        """Of all that runs and waits."""
        return self.engine[LEAD] + float(self.rows[WORK].sum())

    @property
    def load(self) -> int:
        """Requests that run and wait."""
        return self.slot.running + sum(group.waiting for group in self.groups)

    def goes_on(self, model: str, position: int) -> bool:
        """The active model serves a group there, without a model swap before."""
        return self.slot.active_model == model and bool((self.rows[MODEL, :position] == self.engine[ACTIVE]).all())

    def insert(self, position: int, group: Group, column: Floats) -> None:
        self.groups.insert(position, group)
        self.rows = np.insert(self.rows, position, column, axis=1)


def lines_of(board: Board, table: ClassTable, now_s: float, without: Collection[str] = ()) -> list[Line]:
    """The queues of the instances that serve now, by name, without some groups. Costs O(groups)."""
    slots = board.serving
    queues = [[group for group in board.queue_groups(slot.facts.name) if group.group_id not in without] for slot in slots]
    bounds = np.cumsum([0, *(len(queue) for queue in queues)]).tolist()
    on = np.arange(len(slots), dtype=np.int64).repeat([len(queue) for queue in queues])
    columns = table.columns([group for queue in queues for group in queue])
    crowd = crowd_of(slots, columns.count)
    leaving = table.leave_costs(board, slots)
    rows = table.rows(slots, on, columns, crowd, now_s, leaving)
    engines = engine_rows(table.estimates, slots, crowd, leaving)
    return [
        Line(slot=slot, groups=queue, rows=rows[:, begin:end], engine=engine, crowd=crowd, leaving=costs)
        for slot, queue, engine, costs, (begin, end) in zip(slots, queues, engines, leaving, pairwise(bounds), strict=True)
    ]


def crowd_of(slots: Sequence[Slot], waiting: Floats) -> float:
    """Requests that an instance has on average, which share its batch."""
    return (float(waiting.sum()) + sum(slot.running for slot in slots)) / max(1, len(slots))


def engine_rows(estimates: Estimates, slots: Sequence[Slot], crowd: float, leaving: Floats) -> list[tuple[float, ...]]:
    """The columns of queues (QUEUE_ROWS)."""
    return [
        (
            engine.lead_s(crowd),
            engine.left_variance,
            engine.drain_s,
            engine.drain_variance,
            engine.clear_cost,
            leave_cost_of(engine, costs),
            engine.model_code,
        )
        for engine, costs in zip(map(estimates.engine, slots), leaving, strict=True)
    ]


def leave_cost_of(engine: Engine, leaving: Floats) -> float:
    """For the active model of an instance; `leaving`: its costs for all models."""
    return float(leaving[engine.model_code]) if 0 <= engine.model_code < len(leaving) else 0.0


def columns_on(lines: Sequence[Line], table: ClassTable, group: Group, now_s: float) -> Floats:
    """A group as it would be on each of some queues [GROUP_ROWS, lines]."""
    slots = [line.slot for line in lines]
    on = np.arange(len(slots), dtype=np.int64)
    alone = table.columns([group]).take(np.zeros(len(slots), dtype=np.int64))
    return table.rows(slots, on, alone, lines[0].crowd, now_s, np.array([line.leaving for line in lines]))


def times_of(lines: Sequence[Line], table: ClassTable) -> OrderTimes:
    """Of the groups of all queues, one queue after the other."""
    queue = np.arange(len(lines)).repeat([len(line.groups) for line in lines])
    rows, engines = np.concatenate([line.rows for line in lines], axis=1), np.array([line.engine for line in lines]).T
    return order_times(rows, queue, engines, table.estimates.policy.weights)


def plan_cost(board: Board, table: ClassTable, now_s: float) -> Costs:
    """Predicted cost of the plan as it is, without groups that nobody serves."""
    return plan_costs(board, table, now_s, [board.queues])[0]


def plan_costs(board: Board, table: ClassTable, now_s: float, plans: Sequence[Mapping[str, Sequence[str]]]) -> list[Costs]:
    """Of several orders of the same board, in one pass. Costs O(groups) for each."""
    slots = board.serving
    if not slots:
        return [Costs()] * len(plans)
    names = [slot.facts.name for slot in slots]
    found = {group_id for plan in plans for name in names for group_id in plan.get(name, ())}
    # In the order of the board, so that equal plans give equal sums.
    groups = [group for group_id, group in board.groups.items() if group_id in found]
    columns = table.columns(groups)
    place = {group.group_id: number for number, group in enumerate(groups)}
    queues = [plan.get(name, ()) for plan in plans for name in names]
    orders = np.array([place[group_id] for queue in queues for group_id in queue], dtype=np.int64)
    queue = np.arange(len(queues)).repeat([len(each) for each in queues])
    crowd = crowd_of(slots, columns.count)
    leaving = table.leave_costs(board, slots)
    rows = table.rows(slots, queue % len(slots), columns.take(orders), crowd, now_s, leaving)
    heads = engine_rows(table.estimates, slots, crowd, leaving)
    engines = np.tile(np.array(heads).reshape(len(slots), QUEUE_ROWS).T, len(plans))
    times = order_times(rows, queue, engines, table.estimates.policy.weights)
    return [times.costs(slice(number * len(slots), (number + 1) * len(slots))) for number in range(len(plans))]
