"""Changes of the plan: new homes for groups whose instance is gone, a whole new order, and the chunks that carry either out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlm_core.instance import UNASSIGNED
from qlm_planner.board import Board, Group, Slot
from qlm_planner.construct import PORTFOLIO, SHORT_PORTFOLIO, construct
from qlm_planner.effects import ApplyChunk, Segment
from qlm_planner.estimates import Estimates
from qlm_planner.insertion import Line, best_place, lines_of
from qlm_planner.policy import BATCH_MAX
from qlm_planner.timeline import Cost

Target = dict[str, list[str]]
"""Group ids of each queue as they should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordering:
    """A new order for everything; `target` is None where it would not save enough."""

    target: Target | None
    cost_before: float
    cost_after: float


def current(board: Board) -> Target:
    return {name: list(queue) for name, queue in board.queues.items()}


def plan_cost(board: Board, estimates: Estimates, now_s: float) -> Cost:
    """Predicted cost of the plan as it is, without groups that nobody serves."""
    total = Cost()
    for line in lines_of(board, estimates):
        total = total + line.timeline(now_s).cost
    return total


def relocate(board: Board, estimates: Estimates, moving: Sequence[Group], now_s: float) -> Target:
    """Homes for homeless groups, by insertion in their order; what no instance can serve goes to "unassigned"."""
    target = current(board)
    leaving = {group.group_id for group in moving}
    lines = lines_of(board, estimates, leaving)
    by_name = {line.slot.facts.name: line for line in lines}
    for name, queue in target.items():
        target[name] = [group_id for group_id in queue if group_id not in leaving]
    for group in moving:
        place = best_place(lines, estimates, group, now_s)
        if place is None:
            _insert_unassigned(board, target[UNASSIGNED], group)
        else:
            line = by_name[place.instance]
            line.insert(place.position, estimates.term(line.slot, group))
            target[place.instance].insert(place.position, group.group_id)
    return target


def homeless(board: Board, estimates: Estimates, *, lost_too: bool) -> list[Group]:
    """Open groups that must move, most urgent first: their queue's instance is draining, does not serve their model or (`lost_too`) is
    gone; those of "unassigned" that somebody can serve now; and those that stand before a group of a higher band (requeued ones do)."""
    slots = [slot for _, slot in sorted(board.slots.items())]
    servable: dict[str, bool] = {}
    found: list[Group] = []
    for name in sorted(board.queues):
        slot = board.slots.get(name)
        if slot is not None and not slot.alive and not lost_too:
            continue
        band_behind = None
        for group in reversed(board.queue_groups(name)):
            model = group.traits.key.model
            if model not in servable:
                servable[model] = any(estimates.can_serve(each, model) for each in slots)
            if slot is None:
                moves = servable[model]
            else:
                moves = not estimates.can_serve(slot, model) or (band_behind is not None and group.band > band_behind)
            if moves:
                found.append(group)
            else:
                band_behind = group.band if band_behind is None else min(band_behind, group.band)
    return sorted(found, key=lambda group: group.urgency)


def reorder(board: Board, estimates: Estimates, now_s: float) -> Reordering:
    """All groups on queues of instances that serve, anew: earliest deadline first with batching by model, heads kept. Groups that fit
    nowhere stay where they are."""
    policy = estimates.policy
    lines = lines_of(board, estimates)
    names = [line.slot.facts.name for line in lines]
    slots = [line.slot for line in lines]
    heads = [[group for group in board.queue_groups(slot.facts.name)[:1] if _fits(estimates, slot, group)] for slot in slots]
    kept = {group.group_id for head in heads for group in head}
    free = [
        group
        for slot in slots
        for group in board.queue_groups(slot.facts.name)
        if group.group_id not in kept and any(_fits(estimates, other, group) for other in slots)
    ]
    free.sort(key=lambda group: group.urgency)
    before = sum(line.timeline(now_s).cost.weighed(policy) for line in lines)
    options = [(group, [estimates.term(slot, group) if _fits(estimates, slot, group) else None for slot in slots]) for group in free]
    portfolio = PORTFOLIO if len(free) * len(lines) <= policy.portfolio_pairs_max else SHORT_PORTFOLIO
    best: list[list[Group]] | None = None
    best_cost = 0.0
    for rule in portfolio if lines else ():
        orders = _banded(construct(slots, heads, options, estimates, rule, now_s))
        built = [Line.of(slot, order, estimates, keep=False) for slot, order in zip(slots, orders, strict=True)]
        cost = sum(line.timeline(now_s).cost.weighed(policy) for line in built)
        if best is None or cost < best_cost:
            best, best_cost = orders, cost
    if best is None or before - best_cost <= max(policy.replan_gain_min, policy.replan_gain * before):
        return Reordering(target=None, cost_before=before, cost_after=before)
    target = current(board)
    moving = {group.group_id for group in free}
    for name in target:
        target[name] = [group_id for group_id in target[name] if group_id not in moving]
    for name, order in zip(names, best, strict=True):
        placed = {group.group_id for group in order}
        target[name] = [group.group_id for group in order] + [group_id for group_id in target[name] if group_id not in placed]
    return Reordering(target=target, cost_before=before, cost_after=best_cost)


def next_chunk(board: Board, target: Mapping[str, list[str]]) -> ApplyChunk | None:
    """The next part of the way from the board to a target: at most BATCH_MAX group ids, whole runs from the first difference of a queue.
    None when they are equal. Groups that left the board or came to it since are left as they are."""
    left = BATCH_MAX
    segments: list[Segment] = []
    touched: set[str] = set()
    for name in sorted(target):
        if name not in board.queues or left == 0:
            continue
        wanted = [group_id for group_id in target[name] if group_id in board.groups and board.groups[group_id].open]
        have = board.queues[name]
        start = _common_prefix(have, wanted)
        ids = wanted[start : _changed_until(have, wanted, start)][:left]
        if ids:
            segments.append(Segment(instance=name, start=start, group_ids=tuple(ids)))
            left -= len(ids)
            touched.add(name)
            touched.update(board.groups[group_id].instance for group_id in ids)
    if not segments:
        return None
    return ApplyChunk(
        plan_version=board.plan_version + 1,
        versions={name: board.versions[name] for name in sorted(touched)},
        segments=tuple(segments),
    )


def apply_to_board(board: Board, chunk: ApplyChunk) -> None:
    """What the queue does with a chunk, on the board."""
    named = {group_id for segment in chunk.segments for group_id in segment.group_ids}
    moved = {name: [group_id for group_id in board.queues[name] if group_id not in named] for name in chunk.versions}
    for segment in chunk.segments:
        moved[segment.instance][segment.start : segment.start] = [each for each in segment.group_ids if board.groups[each].open]
    board.move(moved)


def _fits(estimates: Estimates, slot: Slot, group: Group) -> bool:
    return estimates.can_serve(slot, group.traits.key.model)


def _insert_unassigned(board: Board, queue: list[str], group: Group) -> None:
    place = next((at for at, other in enumerate(queue) if board.groups[other].urgency > group.urgency), len(queue))
    queue.insert(place, group.group_id)


def _banded(orders: list[list[Group]]) -> list[list[Group]]:
    """A head that is kept may be of a lower band than what comes behind it: it then gives way."""
    return [sorted(order, key=lambda group: group.band) for order in orders]


def _common_prefix(one: list[str], other: list[str]) -> int:
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def _changed_until(have: list[str], wanted: list[str], start: int) -> int:
    """Behind this place both lists are equal to the end, and may stay as they are."""
    end = len(wanted)
    at = len(have)
    while end > start and at > start and wanted[end - 1] == have[at - 1]:
        end -= 1
        at -= 1
    return end
