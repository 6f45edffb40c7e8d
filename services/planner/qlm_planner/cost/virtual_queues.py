"""The virtual queues of serving instances as input of `order_cost`, and the costs of whole plans."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.absence import Absences
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.order_cost import ACTIVE, COUNT, LEAD, MODEL, WORK, Floats, Integers, OrderTimes, order_times
from qlm_planner.cost.service_times import ClassTable, GroupColumns
from qlm_planner.search.problem import Costs


@dataclass(slots=True, kw_only=True)
class Line:
    """One virtual queue: `groups` in order, as `rows` of `order_cost`, and its column there (`engine`). `crowds` [models]: as in
    `crowds_of`. `absences`: of this queue alone."""

    slot: Slot
    groups: list[Group]
    rows: Floats
    engine: tuple[float, ...]
    crowds: Floats
    absences: Absences

    @property
    def work_s(self) -> float:
        """Seconds of all running and waiting work."""
        return self.engine[LEAD] + float(self.rows[WORK].sum())

    @property
    def load(self) -> int:
        """Running and waiting requests."""
        return self.slot.running + sum(group.waiting for group in self.groups)

    @property
    def end_model(self) -> str:
        """The model of the last group, else the active one."""
        return self.groups[-1].traits.key.model if self.groups else self.slot.active_model

    def continues_batch(self, model: str, position: int) -> bool:
        """Whether the active model serves a group at a position without a swap before it."""
        return self.slot.active_model == model and bool((self.rows[MODEL, :position] == self.engine[ACTIVE]).all())

    def insert(self, position: int, group: Group, column: Floats) -> None:
        self.groups.insert(position, group)
        self.rows = np.insert(self.rows, position, column, axis=1)
        self.crowds[int(column[MODEL])] += column[COUNT]


def lines_of(board: Board, table: ClassTable, now_s: float, without: Collection[str] = ()) -> list[Line]:
    """The queues of serving instances, by name, without some groups. O(groups)."""
    slots = board.serving
    queues = [[group for group in board.queue_groups(slot.facts.name) if group.group_id not in without] for slot in slots]
    bounds = np.cumsum([0, *(len(queue) for queue in queues)]).tolist()
    on = np.arange(len(slots), dtype=np.int64).repeat([len(queue) for queue in queues])
    columns = table.columns([group for queue in queues for group in queue])
    absences = table.absences(board, slots)
    crowds = crowds_of(slots, table.estimates, on, columns)
    rows = table.rows(slots, on, columns, crowds[on, columns.model], now_s)
    engines = engine_rows(table.estimates, slots, crowds, absences)
    return [
        Line(slot=slot, groups=queues[at], rows=rows[:, begin:end], engine=engines[at], crowds=crowds[at], absences=absences.take([at]))
        for at, (slot, (begin, end)) in enumerate(zip(slots, pairwise(bounds), strict=True))
    ]


def crowds_of(slots: Sequence[Slot], estimates: Estimates, queue: Integers, groups: GroupColumns) -> Floats:
    """Requests that share a batch with one of a model [queues, models]. For the active model, and for all where none is active: requests
    that run and wait there; for others: the mean of all instances. `slots`: of the queues; `queue` [groups]: their queues."""
    active = [estimates.code(slot.active_model) if slot.active_model else -1 for slot in slots]
    crowds = np.zeros((len(slots), estimates.codes))
    np.add.at(crowds, (queue, groups.model), groups.count)
    mean = mean_crowd(slots, groups.count)
    for crowd, slot, code in zip(crowds, slots, active, strict=True):
        if code >= 0:
            known = crowd[code] + slot.running
            crowd[:] = mean
            crowd[code] = known
    return crowds


def mean_crowd(slots: Sequence[Slot], waiting: Floats) -> float:
    """Mean requests of an instance."""
    return (float(waiting.sum()) + sum(slot.running for slot in slots)) / max(1, len(slots))


def engine_rows(estimates: Estimates, slots: Sequence[Slot], crowds: Floats, absences: Absences) -> list[tuple[float, ...]]:
    """The columns of queues (QUEUE_ROWS)."""
    return [
        (
            engine.lead_s(float(crowd[engine.model_code]) if engine.model_code >= 0 else 0.0),
            engine.left_variance,
            engine.drain_s,
            engine.drain_variance,
            engine.clear_cost,
            leave_cost,
            engine.model_code,
        )
        for engine, crowd, leave_cost in zip(map(estimates.engine, slots), crowds, absences.leave_cost.tolist(), strict=True)
    ]


def columns_on(lines: Sequence[Line], table: ClassTable, group: Group, now_s: float) -> Floats:
    """A group's column on each queue [GROUP_ROWS, lines]."""
    slots = [line.slot for line in lines]
    on = np.arange(len(slots), dtype=np.int64)
    alone = table.columns([group]).take(np.zeros(len(slots), dtype=np.int64))
    crowd = np.array([line.crowds[alone.model[0]] for line in lines]) + group.waiting
    return table.rows(slots, on, alone, crowd, now_s)


def times_of(lines: Sequence[Line], table: ClassTable) -> OrderTimes:
    """Times of all groups, queue after queue."""
    queue = np.arange(len(lines)).repeat([len(line.groups) for line in lines])
    rows, engines = np.concatenate([line.rows for line in lines], axis=1), np.array([line.engine for line in lines]).T
    return order_times(rows, queue, engines, table.estimates.policy.weights)


def plan_cost(board: Board, table: ClassTable, now_s: float) -> Costs:
    """Predicted cost of the present plan, without groups that no instance serves."""
    return plan_costs(board, table, now_s, [board.queues])[0]


def plan_costs(board: Board, table: ClassTable, now_s: float, plans: Sequence[Mapping[str, Sequence[str]]]) -> list[Costs]:
    """Predicted costs of several orders of one board, in one pass. O(groups) each."""
    slots = board.serving
    if not slots:
        return [Costs()] * len(plans)
    names = [slot.facts.name for slot in slots]
    found = {group_id for plan in plans for name in names for group_id in plan.get(name, ())}
    # In the order of the board: equal plans give equal sums.
    groups = [group for group_id, group in board.groups.items() if group_id in found]
    columns = table.columns(groups)
    place = {group.group_id: number for number, group in enumerate(groups)}
    queues = [plan.get(name, ()) for plan in plans for name in names]
    orders = np.array([place[group_id] for queue in queues for group_id in queue], dtype=np.int64)
    queue = np.arange(len(queues)).repeat([len(each) for each in queues])
    placed, of_all = columns.take(orders), list(slots) * len(plans)
    crowds = crowds_of(of_all, table.estimates, queue, placed)
    rows = table.rows(slots, queue % len(slots), placed, crowds[queue, placed.model], now_s)
    absences = table.absences(board, slots).take(np.arange(len(queues)) % len(slots))
    engines = np.array(engine_rows(table.estimates, of_all, crowds, absences)).T
    times = order_times(rows, queue, engines, table.estimates.policy.weights, absences)
    return [times.costs(slice(number * len(slots), (number + 1) * len(slots))) for number in range(len(plans))]
