"""Converts the board to a problem for the solver, and the solver's orders to queues.

Instances with equal engines share rows of the problem (a *kind*): the same batch and profiles, with learned speeds within `SPEED_STEP`; all
have the mean batch. The resulting plan is judged with each instance's own profiles and batch (`virtual_queues.plan_costs`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.cost.estimates import Estimates, Likeness
from qlm_planner.cost.order_cost import Floats
from qlm_planner.cost.service_times import BATCH, ClassTable, GroupColumns, service_times
from qlm_planner.cost.virtual_queues import mean_crowd
from qlm_planner.search.problem import Orders, Problem, ProblemError

SPEED_STEP = 0.1
"""Learned speeds with a ratio below e^SPEED_STEP are one kind."""
SWAP_STEPS = 5.0
"""Speed steps in one step of the swap times, which matter less often."""
KINDS_MAX = 32
"""Most kinds; with more, speeds are compared more coarsely."""
KindKey = tuple[object, ...]
Able = tuple[str, int, tuple[str, ...]]
"""The means of an instance: its GPU, the number of GPUs, its models."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """A problem and the meaning of its numbers: `groups` (ids), `queues` (instances), `able` (of each instance), `orders` (the present
    queues), `heads` (ids, "" for none)."""

    problem: Problem
    groups: tuple[str, ...]
    queues: tuple[str, ...]
    able: tuple[Able, ...]
    orders: Orders
    heads: tuple[str, ...]

    def lists(self, orders: Orders) -> dict[str, list[str]]:
        """Orders as group ids by instance."""
        return {queue: [self.groups[number] for number in order] for queue, order in zip(self.queues, orders.lists(), strict=True)}


def draft(board: Board, estimates: Estimates, table: ClassTable, now_s: float) -> Draft | None:
    """The problem of all groups on serving instances; None for fewer than two. Raises ProblemError for profiles without valid figures."""
    slots = board.serving
    queues = [board.queue_groups(slot.facts.name) for slot in slots]
    groups = [group for queue in queues for group in queue]
    if len(groups) < 2:
        return None
    columns = table.columns(groups)
    orders, heads = standing(estimates, slots, queues)
    return Draft(
        problem=problem_of(
            slots, columns, mean_crowd(slots, columns.count), orders, heads, table, now_s, table.absences(board, slots).leave_cost
        ),
        groups=tuple(columns.ids),
        queues=tuple(slot.facts.name for slot in slots),
        able=tuple(_able(slot) for slot in slots),
        orders=orders,
        heads=tuple(heads),
    )


def standing(estimates: Estimates, slots: Sequence[Slot], queues: Sequence[Sequence[Group]]) -> tuple[Orders, list[str]]:
    """The present queues as orders of groups numbered along them, and the head of each ("" for none)."""
    first = np.zeros(len(slots) + 1, dtype=np.int64)
    np.cumsum([len(queue) for queue in queues], out=first[1:])
    heads = [_head(estimates, slot, queue) for slot, queue in zip(slots, queues, strict=True)]
    return Orders(first=first, groups=np.arange(first[-1], dtype=np.int32)), heads


def problem_of(
    slots: Sequence[Slot],
    columns: GroupColumns,
    crowd: float,
    orders: Orders,
    heads: Sequence[str],
    table: ClassTable,
    now_s: float,
    leave_cost: Floats,
) -> Problem:
    """The problem of groups and instances. Raises ProblemError for profiles without valid figures."""
    estimates = table.estimates
    kinds, representatives = kinds_of(slots, estimates, table)
    names, model = table.models(columns)
    swaps = np.array([[_swap_s(estimates, slot, name) for name in names] for slot in representatives]).reshape(len(representatives), -1, 2)
    engines = [estimates.engine(slot) for slot in slots]
    return Problem(
        model=model.astype(np.int32),
        band=columns.band.astype(np.int32),
        count=columns.count,
        deadline_s=columns.deadline_s - now_s,
        spread_s=columns.spread_s,
        slo_s=columns.slo_s,
        weight=columns.weight * columns.due_share,
        **_kind_times(representatives, columns, table, crowd),
        cold_s=np.ascontiguousarray(swaps[:, :, 0]),
        warm_s=np.ascontiguousarray(swaps[:, :, 1]),
        kind=np.array(kinds, dtype=np.int32),
        active=np.array([names.index(slot.active_model) if slot.active_model in names else -1 for slot in slots], dtype=np.int32),
        lead_s=np.array([engine.lead_s(crowd) for engine in engines]),
        lead_variance=np.array([engine.left_variance for engine in engines]),
        drain_lead_s=np.array([engine.drain_s for engine in engines]),
        drain_lead_variance=np.array([engine.drain_variance for engine in engines]),
        warm=np.array([[name in slot.warm_models for name in names] for slot in slots], dtype=np.bool_).reshape(len(slots), len(names)),
        head=np.array([begin if head else -1 for begin, head in zip(orders.first.tolist(), heads, strict=False)], dtype=np.int32),
        clear_cost=np.array([engine.clear_cost for engine in engines]),
        leave_cost=leave_cost,
        weights=estimates.policy.weights,
    )


def reconciled(board: Board, draft: Draft, orders: Orders) -> dict[str, list[str]]:
    """Orders as queues of the present board. Groups that ended, or moved out of the draft's reach, are left out. New groups, and groups
    without an order, follow their present predecessor if that stays on the queue, else precede the first less urgent group. A new head that
    runs stays in front. Instances that serve no more, or have other models, keep their queues."""
    wanted = draft.lists(orders)
    able = dict(zip(draft.queues, draft.able, strict=True))
    reach = {name for name in wanted if (slot := board.slots.get(name)) is not None and slot.serving and _able(slot) == able[name]}
    target = board.order()
    home: dict[str, str] = {}
    for name in sorted(reach):
        kept = []
        for group_id in wanted[name]:
            group = board.groups.get(group_id)
            if group is not None and group.open and group.instance in reach:
                home[group_id] = name
                kept.append(group_id)
        target[name] = kept
    heads = dict(zip(draft.queues, draft.heads, strict=True))
    for name in sorted(reach):
        _put_others(board, name, target[name], home)
        have = board.queues[name]
        if have and have[0] != heads[name] and home.get(have[0]) == name and board.slots[name].running:
            target[name].remove(have[0])
            target[name].insert(0, have[0])
        ranks = [board.groups[group_id].rank for group_id in target[name]]
        if any(left > right for left, right in pairwise(ranks)):
            target[name].sort(key=lambda group_id: board.groups[group_id].rank)
    return target


def _able(slot: Slot) -> Able:
    return (slot.facts.gpu, slot.facts.n_gpu, slot.facts.models)


def _put_others(board: Board, name: str, queue: list[str], home: dict[str, str]) -> None:
    """Inserts a queue's groups that have no order."""
    before = ""
    for group_id in board.queues[name]:
        if group_id not in home:
            at = queue.index(before) + 1 if before else board.place_by_urgency(queue, board.groups[group_id])
            queue.insert(at, group_id)
        if home.get(group_id, name) == name:
            before = group_id


def kinds_of(slots: Sequence[Slot], estimates: Estimates, table: ClassTable) -> tuple[list[int], list[Slot]]:
    """The kind of each instance, and the first instance of each kind. Instances that serve alike share one."""
    alike = table.alike(slots)
    step = SPEED_STEP
    while True:
        numbers: dict[KindKey, int] = {}
        of: dict[Likeness, int] = {}
        representatives: list[Slot] = []
        for slot, likeness in zip(slots, alike, strict=True):
            if likeness not in of:
                key = _kind_key(slot, estimates, step)
                if key not in numbers:
                    numbers[key] = len(numbers)
                    representatives.append(slot)
                of[likeness] = numbers[key]
        kinds = [of[likeness] for likeness in alike]
        if len(representatives) <= KINDS_MAX or step > 10.0:
            return kinds, representatives
        step *= 2.0


def _kind_key(slot: Slot, estimates: Estimates, step: float) -> KindKey:
    facts = slot.facts
    speeds: list[int | None] = []
    for name in sorted(facts.models):
        hardware = estimates.hardware(facts, name)
        if hardware is None:
            speeds.append(None)
            continue
        swaps = (hardware.swap_warm.slowdown, hardware.swap_cold.slowdown)
        speeds += [round(math.log(hardware.slowdown) / step), *(round(math.log(each) / (SWAP_STEPS * step)) for each in swaps)]
    batches = tuple(slot.batch(name) for name in facts.models)
    return (facts.gpu, facts.n_gpu, facts.models, batches, facts.time_scale, *speeds)


def _kind_times(representatives: Sequence[Slot], columns: GroupColumns, table: ClassTable, crowd: float) -> dict[str, NDArray[np.float64]]:
    """The problem's figures by kind and group [kinds, groups]."""
    on = np.arange(len(representatives), dtype=np.int64)[:, None]
    shared = table.classes(representatives, on, columns)
    unserved = np.isnan(shared[BATCH])
    names = ("work_s", "work_variance", "own_s", "own_variance", "drain_s")
    found = dict(zip(names, service_times(shared, columns, crowd), strict=True))
    for name, values in found.items():
        values[unserved] = np.inf
        if np.isnan(values).any():
            raise ProblemError(f"{name}: the profiles give no number for {int(np.isnan(values).sum())} of {values.size}")
    return found


def _swap_s(estimates: Estimates, slot: Slot, model: str) -> tuple[float, float]:
    """Swap seconds from disk and from host memory; infinite if the instance does not have the model."""
    hardware = estimates.hardware(slot.facts, model)
    return (math.inf, math.inf) if hardware is None else (hardware.swap_s(warm=False), hardware.swap_s(warm=True))


def _head(estimates: Estimates, slot: Slot, queue: Sequence[Group]) -> str:
    """The group that is served now or next."""
    return queue[0].group_id if queue and estimates.can_serve(slot, queue[0].traits.key.model) else ""
