"""Chooses a new group's position: the cheapest one on all instances that can serve it.

Candidates on a queue, within the group's priority band:
- by earliest deadline: behind every group whose deadline is not later;
- in a run of its own model (the nearest on both sides, and the last), by deadline inside the run, without a swap. Overtaking groups with
  earlier deadlines costs the lateness beyond their slack;
- in front of its band, if it is late behind earlier deadlines (which may be late anyway);
- in front of the head only for a higher band, for the active model, or for a stated gain; otherwise two models would alternate. The
  running batch then drains, or is evicted (`order_cost`).

Where nothing waits there is one position an instance, and mostly no cost to compare (`idle_place`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.cost.absence import Absences
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.order_cost import ACTIVE, BAND, COUNT, DEADLINE, FAR_S, MODEL, SLO, TOTAL, Floats, order_times
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.cost.virtual_queues import Line, columns_on

COST_DIGITS = 6
"""Decimal places of a cost; sums in another order differ beyond them."""
LATE = 0.5
"""Expected share of late requests above which a group is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """A position for a group. `added_cost`: growth of the plan's cost; `overtakes`: distance from the position by deadline."""

    line: Line
    position: int
    added_cost: float
    overtakes: int
    end_s: float

    @property
    def rank(self) -> tuple[float, int, float]:
        """Sort key: equal costs (groups of one model in any order) are ordered by deadline."""
        return (round(self.added_cost, COST_DIGITS), self.overtakes, self.end_s)


def idle_place(board: Board, estimates: Estimates, group: Group) -> str:
    """The instance that `best_place` chooses, where that needs no costs: nothing waits on the instances that can serve a group, and there
    is only one, or all have the model active and one of them has the fastest step. "" elsewhere."""
    model = group.traits.key.model
    able = [slot for slot in board.serving if estimates.can_serve(slot, model)]
    if not able or any(board.queues[slot.facts.name] for slot in able):
        return ""
    if len(able) == 1:
        return able[0].facts.name
    if len(able) > 2 * estimates.policy.lines_max or any(slot.active_model != model for slot in able):
        return ""
    steps_s = [estimates.step_s(slot, group, slot.running + group.waiting) for slot in able]
    least_s = min(steps_s)
    return able[steps_s.index(least_s)].facts.name if steps_s.count(least_s) == 1 else ""


def best_place(lines: Sequence[Line], table: ClassTable, group: Group, now_s: float) -> QueuePlace | None:
    """The cheapest position for a group that is on no queue; None if no line can serve it. Equal costs: the position nearest to its
    deadline, the earlier end, the first line. Of many lines, only the `lines_max` shortest are tried, and as many with its model active."""
    model = group.traits.key.model
    able = [line for line in lines if table.estimates.can_serve(line.slot, model)]
    most = table.estimates.policy.lines_max
    if len(able) > 2 * most:
        by_work = sorted(able, key=lambda line: line.work_s)
        at_hand = [line for line in by_work if line.slot.active_model == model][:most]
        chosen = {id(line) for line in (*by_work[:most], *at_hand)}
        able = [line for line in able if id(line) in chosen]
    if not able:
        return None
    columns = columns_on(able, table, group, now_s)
    found = [candidates_in(line, columns[:, number]) for number, line in enumerate(able)]
    tries = [(number, position) for number, each in enumerate(found) for position in sorted({each.in_turn, *each.others, each.front})]
    # Orders of column numbers, then one gather: inserting into the rows of every try costs more.
    ends = np.cumsum([0, *(line.rows.shape[1] for line in able)]).tolist()
    orders = [[*range(*span)] for span in pairwise(ends)]
    orders += [[*orders[number][:at], ends[-1] + number, *orders[number][at:]] for number, at in tries]
    rows = np.concatenate([*(line.rows for line in able), columns], axis=1).take([at for order in orders for at in order], axis=1)
    queue = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
    engines = np.array([line.engine for line in (*able, *(able[number] for number, _ in tries))]).T
    absences = Absences.concatenate([line.absences for line in able]).take([*range(len(able)), *(number for number, _ in tries)])
    times = order_times(rows, queue, engines, table.estimates.policy.weights, absences)
    placed, costs = len(able) + np.arange(len(tries)), times.parts[TOTAL]
    groups = np.searchsorted(queue, placed) + [position for _, position in tries]
    in_turn = [position == found[number].in_turn for number, position in tries]
    late = {number for (number, _), at, turn in zip(tries, groups, in_turn, strict=True) if turn and times.late[at] > LATE}
    places = [
        QueuePlace(
            line=able[number],
            position=position,
            added_cost=float(costs[order] - costs[number]),
            overtakes=abs(position - found[number].in_turn),
            end_s=float(times.end_s[at]),
        )
        for order, at, (number, position) in zip(placed, groups, tries, strict=True)
        if number in late or position != found[number].front or position in (found[number].in_turn, *found[number].others)
    ]
    best = min(places, key=lambda place: place.rank)
    if not best.line.continues_batch(model, best.position):
        return best
    # In a continued batch: the instance with the fastest step, of the cheapest position on each.
    by_line = {id(place.line): place for place in sorted(places, key=lambda place: place.rank, reverse=True)}
    beside = [place for place in by_line.values() if place.line.continues_batch(model, place.position)]
    return min(beside, key=lambda place: (_step_s(place.line, table, group), place.rank))


def _step_s(line: Line, table: ClassTable, group: Group) -> float:
    """Step time of the batch that a group joins, with all waiting requests of the first run."""
    others = line.rows[MODEL] != line.engine[ACTIVE]
    sequences = line.slot.running + float(line.rows[COUNT, : _first(others)].sum()) + group.waiting
    return table.estimates.step_s(line.slot, group, sequences)


class Candidates(NamedTuple):
    """Positions for a group behind no lower band: by deadline, others, and the front of its band (for a late group)."""

    in_turn: int
    others: set[int]
    front: int


def candidates_in(line: Line, column: Floats) -> Candidates:
    """Candidate positions on a queue. `column` [GROUP_ROWS]: the group there."""
    rows, band, deadline_s = line.rows, column[BAND], column[DEADLINE]
    earlier = (rows[BAND] < band) | ((rows[BAND] == band) & (rows[DEADLINE] <= deadline_s))
    in_turn = int(np.flatnonzero(earlier)[-1]) + 1 if earlier.any() else 0
    low, high = _first(rows[BAND] >= band), _first(rows[BAND] > band)
    others: set[int] = set()
    front = in_turn
    # Where a requeued group at the head breaks the bands, only the position by deadline is left.
    if low <= in_turn <= high and column[SLO] < FAR_S:
        front = low
        runs = _runs_of(rows, column[MODEL], low, high)
        chosen = [run for run in runs if run[1] <= in_turn][-1:] + [run for run in runs if run[1] > in_turn][:1] + runs[-1:]
        later = rows[DEADLINE] > deadline_s
        others.update(begin + _first(later[begin:end]) for begin, end in chosen)
        # Merged runs are not sorted by deadline: add the first position before a later deadline.
        others.add(low + _first(later[low:high]))
        if low == 0 and line.groups and column[MODEL] == line.engine[ACTIVE] != rows[MODEL, 0]:
            # The running batch is a run too, even without waiting requests.
            others.add(0)
    if line.groups and 0 in (in_turn, front, *others):
        others.add(min(high, _first(rows[MODEL] != rows[MODEL, 0])))
    return Candidates(in_turn, others, front)


def _first(mask: NDArray[np.bool_]) -> int:
    """The first index where a mask holds; its length for none."""
    return int(mask.argmax()) if mask.any() else len(mask)


def _runs_of(rows: Floats, model: float, low: int, high: int) -> list[tuple[int, int]]:
    """[begin, end) of the runs of a model inside a band."""
    edges = np.diff((rows[MODEL, low:high] == model).astype(np.int8), prepend=0, append=0)
    begins, ends = np.flatnonzero(edges == 1) + low, np.flatnonzero(edges == -1) + low
    return [(int(begin), int(end)) for begin, end in zip(begins, ends, strict=True)]
