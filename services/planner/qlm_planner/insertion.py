"""Where a new group goes: the cheapest place of all that respect the order, on all instances that can serve it.

Places in a queue (within the group's priority band):
- by earliest deadline: behind every group whose deadline is not later;
- beside a run of its own model (the nearest before and behind that place, and the last), by deadline inside the run: no swap of its own.
  It may overtake groups with earlier deadlines there as long as none of them is then expected to end more than a stated share of its SLO
  late (so nobody starves), and only if that costs less: a join costs those behind it exactly what their slack does not absorb;
- in front of all of its band, if it would end late behind those with earlier deadlines (they may be late anyway);
- in front of the head only for a higher band, for the model that is active, or for a stated gain: a head that runs is not displaced for a
  little, which is what makes two models take turns. What runs then ends first, or gives way (`qlm_core.clearing`); the cost has either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlm_planner.class_terms import ClassTerms
from qlm_planner.items import Group
from qlm_planner.order_cost import ACTIVE, BAND, COUNT, DEADLINE, FAR_S, MODEL, SLO, Floats, order_times
from qlm_planner.queues import Line, columns_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place for a group. `added_cost`: what the plan costs more with it there."""

    line: Line
    position: int
    added_cost: float
    end_s: float


def best_place(lines: Sequence[Line], made: ClassTerms, group: Group, now_s: float) -> Place | None:
    """The cheapest place for a group that is on no queue; None if no line can serve it. Equal costs: the earlier end, then the first line.
    Of many lines only the shortest `lines_max` are tried, and as many of those that have the model active."""
    model = group.traits.key.model
    able = [line for line in lines if made.estimates.can_serve(line.slot, model)]
    most = made.estimates.policy.lines_max
    if len(able) > 2 * most:
        by_work = sorted(able, key=lambda line: line.work_s)
        at_hand = [line for line in by_work if line.slot.active_model == model][:most]
        chosen = {id(line) for line in (*by_work[:most], *at_hand)}
        able = [line for line in able if id(line) in chosen]
    if not able:
        return None
    columns = columns_on(able, made, group, now_s)
    tries = [(line, number, position) for number, line in enumerate(able) for position in candidate_positions(line, columns[:, number])]
    orders = [*(line.rows for line in able), *(np.insert(line.rows, at, columns[:, number], axis=1) for line, number, at in tries)]
    queue = np.repeat(np.arange(len(orders)), [order.shape[1] for order in orders])
    engines = np.array([line.engine for line in (*able, *(line for line, _, _ in tries))]).T
    times = order_times(np.concatenate(orders, axis=1), queue, engines, made.estimates.weights)
    first = np.searchsorted(queue, np.arange(len(orders)))
    places = [
        Place(
            line=line,
            position=position,
            added_cost=float(times.cost[len(able) + at] - times.cost[number]),
            end_s=float(times.end_s[first[len(able) + at] + position]),
        )
        for at, (line, number, position) in enumerate(tries)
    ]
    best = min(places, key=lambda place: (place.added_cost, place.end_s))
    if not best.line.goes_on(model, best.position):
        return best
    # The cheapest of each queue whose batch it joins: the one with the fastest step.
    by_line = {id(place.line): place for place in sorted(places, key=lambda place: (place.added_cost, place.end_s), reverse=True)}
    beside = [place for place in by_line.values() if place.line.goes_on(model, place.position)]
    return min(beside, key=lambda place: (_step_s(place.line, made, group), place.added_cost, place.end_s))


def _step_s(line: Line, made: ClassTerms, group: Group) -> float:
    """A step of the batch that a group joins, with all that waits of the first run."""
    others = line.rows[MODEL] != line.engine[ACTIVE]
    sequences = line.slot.running + float(line.rows[COUNT, : _first(others)].sum()) + group.waiting
    return made.estimates.step_s(line.slot, group.traits.key, group.waiting_prompt_tokens / max(1, group.waiting), sequences)


def candidate_positions(line: Line, column: Floats) -> list[int]:
    """Positions to try for a group, ascending."""
    rows = line.rows
    band, deadline_s = column[BAND], column[DEADLINE]
    earlier = (rows[BAND] < band) | ((rows[BAND] == band) & (rows[DEADLINE] <= deadline_s))
    by_deadline = int(np.flatnonzero(earlier)[-1]) + 1 if earlier.any() else 0
    low, high = _first(rows[BAND] >= band), _first(rows[BAND] > band)
    # A queue that breaks the bands (a requeued group stands at its head) leaves only the place by deadline.
    found = {by_deadline}
    if low <= by_deadline <= high and column[SLO] < FAR_S:
        runs = _runs_of(rows, column[MODEL], low, high)
        chosen = [run for run in runs if run[1] <= by_deadline][-1:] + [run for run in runs if run[1] > by_deadline][:1] + runs[-1:]
        later = rows[DEADLINE] > deadline_s
        found.update(begin + _first(later[begin:end]) for begin, end in chosen)
        # Not sorted by deadline (runs were joined): also the first place that a later deadline leaves. And the front of the band.
        found.update((low, low + _first(later[low:high])))
    if 0 in found and line.groups:
        found.add(_first(rows[MODEL] != rows[MODEL, 0]))
    return sorted(found)


def _first(mask: NDArray[np.bool_]) -> int:
    """The first place where a mask holds; its length where it holds nowhere."""
    return int(mask.argmax()) if mask.any() else len(mask)


def _runs_of(rows: Floats, model: float, low: int, high: int) -> list[tuple[int, int]]:
    """[begin, end) of the runs of a model inside a band."""
    edges = np.diff((rows[MODEL, low:high] == model).astype(np.int8), prepend=0, append=0)
    begins, ends = np.flatnonzero(edges == 1) + low, np.flatnonzero(edges == -1) + low
    return [(int(begin), int(end)) for begin, end in zip(begins, ends, strict=True)]
