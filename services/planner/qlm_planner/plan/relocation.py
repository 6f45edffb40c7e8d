"""Urgent changes of the plan: new queues for groups that cannot stay, and better positions for evicted groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_planner.board.board import Board, Target
from qlm_planner.board.group import Group
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import columns_on, lines_of, plan_costs
from qlm_planner.groups.cheapest_place import best_place
from qlm_planner.policies.baseline import Baseline
from qlm_planner.policies.queue_ends import position_by_age


def relocate(board: Board, table: ClassTable, moving: Sequence[Group], now_s: float, baseline: Baseline | None = None) -> Target:
    """The queues with `moving` inserted in their order (or as a comparison policy decides); paused groups, and groups that no instance can
    serve, move to "unassigned"."""
    target = board.order()
    leaving = {group.group_id for group in moving}
    lines = lines_of(board, table, now_s, leaving)
    for name, queue in target.items():
        target[name] = [group_id for group_id in queue if group_id not in leaving]
    for group in moving:
        able = [line for line in lines if table.estimates.can_serve(line.slot, group.traits.key.model)]
        if not able or board.is_paused(group.traits.key):
            found = None
        elif baseline is not None:
            found = baseline.home(able, table, group, board, now_s)
        else:
            place = best_place(lines, table, group, now_s)
            found = None if place is None else (place.line, place.position)
        if found is None:
            queue, by_age = target[UNASSIGNED], baseline is not None and baseline.by_age
            queue.insert(position_by_age(queue, group, board) if by_age else board.place_by_urgency(queue, group), group.group_id)
        else:
            line, position = found
            line.insert(position, group, columns_on([line], table, group, now_s)[:, 0])
            target[line.slot.facts.name].insert(position, group.group_id)
    return target


def settle(board: Board, table: ClassTable, evicted: Collection[str], now_s: float) -> Target | None:
    """Evicted groups stand right behind the head, perhaps before others of its model, which costs two swaps (A-B-A-B, section 2.4, insight
    3). Moves them behind those, on their queue, if that saves enough; else None."""
    target = board.order()
    for slot in board.serving:
        name = slot.facts.name
        queue = board.queues[name]
        moving = [group_id for group_id in queue[1:] if group_id in evicted]
        rest = [group_id for group_id in queue if group_id not in moving]
        models = [board.groups[group_id].traits.key.model for group_id in rest]
        behind = next((at for at, model in enumerate(models) if model != models[0]), len(models))
        target[name] = [*rest[:behind], *moving, *rest[behind:]]
    if target == board.order():
        return None
    before, after = plan_costs(board, table, now_s, [board.order(), target])
    return target if before.total - after.total > table.estimates.policy.replan_gain_min else None


def homeless(board: Board, estimates: Estimates, *, lost_too: bool, by_age: bool = False) -> list[Group]:
    """Open groups that must move, most urgent first: paused ones; those whose instance drains, does not serve their model or (`lost_too`)
    is lost; servable ones on "unassigned"; and those before a group of a higher band (requeued ones). `by_age`: oldest first, without
    bands."""
    slots = [slot for _, slot in sorted(board.slots.items())]
    servable: dict[str, bool] = {}
    found: list[Group] = []
    for name in sorted(board.queues):
        slot = board.slots.get(name)
        if slot is not None and not slot.alive and not lost_too:
            continue
        band_behind = None
        here: dict[str, bool] = {}
        for group in reversed(board.queue_groups(name)):
            model, paused = group.traits.key.model, board.is_paused(group.traits.key)
            if model not in servable:
                servable[model] = any(estimates.can_serve(each, model) for each in slots)
            if slot is None:
                moves = servable[model] and not paused
            else:
                if model not in here:
                    here[model] = estimates.can_serve(slot, model)
                moves = paused or not here[model] or (not by_age and band_behind is not None and group.band > band_behind)
            if moves:
                found.append(group)
            else:
                band_behind = group.band if band_behind is None else min(band_behind, group.band)
    return sorted(found, key=lambda group: group.order) if by_age else sorted(found, key=lambda group: group.urgency)
