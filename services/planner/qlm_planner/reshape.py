"""Changes of the plan: new homes for groups whose instance is gone, and a whole new order (`qlm_planner.chunks` carries either out)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from qlm_core.instance import UNASSIGNED
from qlm_planner.arrival_order import place_by_age, position_by_age
from qlm_planner.board import Board, Group, Slot
from qlm_planner.construct import PORTFOLIO, SHORT_PORTFOLIO, construct
from qlm_planner.estimates import Estimates
from qlm_planner.insertion import Line, best_place, lines_of, timelines_of
from qlm_planner.policy import Order
from qlm_planner.timeline import Cost

Target = dict[str, list[str]]
"""Group ids of each queue as they should be."""


def current(board: Board) -> Target:
    return {name: list(queue) for name, queue in board.queues.items()}


def plan_cost(board: Board, estimates: Estimates, now_s: float) -> Cost:
    """Predicted cost of the plan as it is, without groups that nobody serves."""
    return sum((made.cost for made in timelines_of(lines_of(board, estimates), now_s)), Cost())


def relocate(board: Board, estimates: Estimates, moving: Sequence[Group], now_s: float) -> Target:
    """Homes for homeless groups, by insertion in their order (under FCFS by their age); what no instance can serve goes to "unassigned"."""
    target = current(board)
    leaving = {group.group_id for group in moving}
    lines = lines_of(board, estimates, leaving)
    by_name = {line.slot.facts.name: line for line in lines}
    for name, queue in target.items():
        target[name] = [group_id for group_id in queue if group_id not in leaving]
    for group in moving:
        if estimates.policy.order is Order.FCFS:
            found = place_by_age(lines, estimates, group, board, now_s)
        else:
            place = best_place(lines, estimates, group, now_s)
            found = None if place is None else (by_name[place.instance], place.position)
        if found is None:
            _insert_unassigned(board, target[UNASSIGNED], group, estimates.policy.order)
        else:
            line, position = found
            line.insert(position, estimates.term(line.slot, group))
            target[line.slot.facts.name].insert(position, group.group_id)
    return target


def settle(board: Board, estimates: Estimates, gave_way: Collection[str], now_s: float) -> Target | None:
    """Groups that gave way stand right behind the head, perhaps between it and others of its model, which would load theirs in between
    (A-B-A-B, section 2.4, insight 3). They go behind those, on their queue, where that saves enough; None where it does nowhere."""
    policy = estimates.policy
    target: Target = {}
    for line in lines_of(board, estimates):
        name = line.slot.facts.name
        queue = board.queues[name]
        moving = [group_id for group_id in queue[1:] if group_id in gave_way]
        rest = [group_id for group_id in queue if group_id not in moving]
        models = [board.groups[group_id].traits.key.model for group_id in rest]
        behind = next((at for at, model in enumerate(models) if model != models[0]), len(models))
        order = [*rest[:behind], *moving, *rest[behind:]]
        if moving and order != queue:
            settled = Line.of(line.slot, [board.groups[group_id] for group_id in order], estimates)
            saved = line.timeline(now_s).cost.weighed(policy) - settled.timeline(now_s).cost.weighed(policy)
            if saved > policy.replan_gain_min:
                target[name] = order
    return {**current(board), **target} if target else None


def homeless(board: Board, estimates: Estimates, *, lost_too: bool) -> list[Group]:
    """Open groups that must move, most urgent first: their queue's instance is draining, does not serve their model or (`lost_too`) is
    gone; those of "unassigned" that somebody can serve now; and those that stand before a group of a higher band (requeued ones do), except
    under FCFS, which knows no bands. There the oldest come first."""
    by_age = estimates.policy.order is Order.FCFS
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
                moves = not estimates.can_serve(slot, model) or (not by_age and band_behind is not None and group.band > band_behind)
            if moves:
                found.append(group)
            else:
                band_behind = group.band if band_behind is None else min(band_behind, group.band)
    return sorted(found, key=lambda group: group.order) if by_age else sorted(found, key=lambda group: group.urgency)


def reorder(board: Board, estimates: Estimates, now_s: float) -> Target | None:
    """All groups on queues of instances that serve, anew: earliest deadline first with batching by model, heads kept. Groups that fit
    nowhere stay where they are. None where it would not save enough."""
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
    before = sum(made.cost.weighed(policy) for made in timelines_of(lines, now_s))
    options = [(group, [estimates.term(slot, group) if _fits(estimates, slot, group) else None for slot in slots]) for group in free]
    portfolio = PORTFOLIO if len(free) * len(lines) <= policy.portfolio_pairs_max else SHORT_PORTFOLIO
    best = [_copy(line) for line in lines]
    best_cost = before
    for rule in portfolio if lines else ():
        orders = _banded(construct(slots, heads, options, estimates, rule, now_s))
        built = [Line.of(slot, order, estimates, keep=False) for slot, order in zip(slots, orders, strict=True)]
        cost = sum(made.cost.weighed(policy) for made in timelines_of(built, now_s))
        if cost < best_cost:
            best, best_cost = built, cost
    best_cost -= _reinsert_late(best, board, estimates, now_s)
    if before - best_cost <= max(policy.replan_gain_min, policy.replan_gain * before):
        return None
    target = current(board)
    placed = {term.group_id for line in best for term in line.terms}
    for name, line in zip(names, best, strict=True):
        others = [group_id for group_id in target[name] if group_id not in placed]
        target[name] = [term.group_id for term in line.terms] + others
    for name in target:
        if name not in names:
            target[name] = [group_id for group_id in target[name] if group_id not in placed]
    return target


def _copy(line: Line) -> Line:
    return replace(line, terms=list(line.terms))


def _reinsert_late(lines: Sequence[Line], board: Board, estimates: Estimates, now_s: float) -> float:
    """Takes groups that would end late out, most urgent first, and puts each where it costs least, also in front of a head that runs;
    returns what that saved."""
    late: list[Group] = []
    for line, made in zip(lines, timelines_of(lines, now_s), strict=True):
        ends_s = now_s + made.end_s
        late += [board.groups[term.group_id] for term, end_s in zip(line.terms, ends_s, strict=True) if end_s > term.deadline_s]
    saved = 0.0
    for group in sorted(late, key=lambda group: group.urgency)[: estimates.policy.reinsert_max]:
        saved += _reinsert(lines, estimates, group, now_s)
    return saved


def _reinsert(lines: Sequence[Line], estimates: Estimates, group: Group, now_s: float) -> float:
    """Puts one group where it costs least, if that saves anything; returns what it saved."""
    policy = estimates.policy
    home = next(line for line in lines if any(term.group_id == group.group_id for term in line.terms))
    position = next(at for at, term in enumerate(home.terms) if term.group_id == group.group_id)
    with_it = home.timeline(now_s).cost.weighed(policy)
    term = home.terms[position]
    home.remove(position)
    spared = with_it - home.timeline(now_s).cost.weighed(policy)
    place = best_place(lines, estimates, group, now_s)
    if place is None or place.added_cost >= spared:
        home.insert(position, term)
        return 0.0
    line = next(line for line in lines if line.slot.facts.name == place.instance)
    line.insert(place.position, estimates.term(line.slot, group))
    return spared - place.added_cost


def _fits(estimates: Estimates, slot: Slot, group: Group) -> bool:
    return estimates.can_serve(slot, group.traits.key.model)


def _insert_unassigned(board: Board, queue: list[str], group: Group, order: Order) -> None:
    if order is Order.FCFS:
        place = position_by_age(queue, group, board)
    else:
        place = next((at for at, other in enumerate(queue) if board.groups[other].urgency > group.urgency), len(queue))
    queue.insert(place, group.group_id)


def _banded(orders: list[list[Group]]) -> list[list[Group]]:
    """A head that is kept may be of a lower band than what comes behind it: it then gives way."""
    return [sorted(order, key=lambda group: group.band) for order in orders]
