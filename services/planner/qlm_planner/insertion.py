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

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from qlm_planner.board import Board
from qlm_planner.class_terms import ClassTerms, serving
from qlm_planner.estimates import Estimates
from qlm_planner.items import Group, Slot
from qlm_planner.policy import Policy
from qlm_planner.terms import Engine, Term
from qlm_planner.timeline import FAR_S, FIELDS, WORK, Columns, Timeline, timeline, timelines


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place for a group. `added_cost`: what the plan costs more with it there."""

    instance: str
    position: int
    added_cost: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class Line:
    """One virtual queue being planned: the groups in its order, as terms and as the same in columns. One to look at (`lines_at_once`) has
    the terms of its head alone."""

    slot: Slot
    engine: Engine
    terms: list[Term]
    columns: Columns

    @classmethod
    def of(cls, slot: Slot, groups: Sequence[Group], estimates: Estimates, *, keep: bool = True) -> Line:
        """`keep`: the groups stand on this queue now, so that their terms are worth keeping."""
        term = estimates.kept_term if keep else estimates.term
        terms = [term(slot, group) for group in groups]
        return cls(slot=slot, engine=estimates.engine(slot), terms=terms, columns=Columns.of(terms, slot.warm_models))

    @property
    def work_s(self) -> float:
        return self.engine.left_s + float(self.columns.rows[WORK].sum())

    @property
    def busy(self) -> bool:
        """Its head is being served, or will be before anything else can be."""
        return bool(self.terms)

    def goes_on(self, model: str, position: int) -> bool:
        """The active model serves a group there, without a model swap before."""
        ahead = self.columns.model[:position]
        return self.engine.active_model == model and bool((ahead == self.engine.model_code).all())

    def timeline(self, now_s: float) -> Timeline:
        return timeline(self.engine, self.columns, now_s)

    def with_term(self, position: int, term: Term) -> Columns:
        return self.columns.inserted(position, term, self.slot.warm_models)

    def insert(self, position: int, term: Term) -> None:
        self.columns = self.with_term(position, term)
        self.terms.insert(position, term)

    def remove(self, position: int) -> None:
        self.columns = Columns(np.delete(self.columns.rows, position, axis=1))
        del self.terms[position]


def best_place(lines: Sequence[Line], estimates: Estimates, group: Group, now_s: float) -> Place | None:
    """The cheapest place for a group that is on no queue; None if no line can serve it. Equal costs: the earlier end, then the first line.
    Where the place is in a batch that goes on (`Line.goes_on`), it is the one of those batches with the fastest step: a request in a batch
    slows all others, which the cost of an order does not have. Of many lines only the shortest `lines_max` are tried, and as many of those
    that have the model active."""
    model = group.traits.key.model
    able = [line for line in lines if estimates.can_serve(line.slot, model)]
    most = estimates.policy.lines_max
    if len(able) > 2 * most:
        by_work = sorted(able, key=lambda line: line.work_s)
        at_hand = [line for line in by_work if line.engine.active_model == model][:most]
        chosen = {id(line) for line in (*by_work[:most], *at_hand)}
        able = [line for line in able if id(line) in chosen]
    tried = best_in_lines([(line, estimates.term(line.slot, group)) for line in able], estimates.policy, now_s)
    best = min(tried, key=lambda place: (place.added_cost, place.end_s), default=None)
    beside = [place for line, place in zip(able, tried, strict=True) if line.goes_on(model, place.position)]
    if best not in beside:
        return best
    by_name = {line.slot.facts.name: line for line in able}
    return min(beside, key=lambda place: (_step_s(by_name[place.instance], estimates, group), place.added_cost, place.end_s))


def _step_s(line: Line, estimates: Estimates, group: Group) -> float:
    """A step of the batch that a group joins, with all that waits of the first run."""
    columns = line.columns
    others = columns.model != line.engine.model_code
    sequences = line.slot.running + float(columns.count[: _first(others)].sum()) + group.waiting
    return estimates.step_s(line.slot, group.traits.key, group.waiting_prompt_tokens / max(1, group.waiting), sequences)


def lines_of(board: Board, estimates: Estimates, without: Collection[str] = ()) -> list[Line]:
    """The queues of the instances that serve now, by name, without some groups."""
    return [
        Line.of(slot, [group for group in board.queue_groups(name) if group.group_id not in without], estimates)
        for name, slot in sorted(board.slots.items())
        if slot.serving
    ]


def lines_at_once(board: Board, made: ClassTerms) -> list[Line]:
    """`lines_of` to look at, for a group that comes: the columns of all queues are made together."""
    slots = serving(board)
    queues = [board.queue_groups(slot.facts.name) for slot in slots]
    bounds = np.cumsum([0, *(len(queue) for queue in queues)]).tolist()
    on = np.arange(len(slots), dtype=np.int64).repeat([len(queue) for queue in queues])
    rows = made.order_rows(slots, on, made.columns([group for queue in queues for group in queue])) if len(on) else np.zeros((FIELDS, 0))
    return [
        Line(
            slot=slot,
            engine=made.estimates.engine(slot),
            terms=[made.estimates.kept_term(slot, group) for group in queue[:1]],
            columns=Columns(rows[:, begin:end]),
        )
        for slot, queue, (begin, end) in zip(slots, queues, pairwise(bounds), strict=True)
    ]


def timelines_of(lines: Sequence[Line], now_s: float) -> list[Timeline]:
    """The queues as they are, worked out together."""
    return timelines([(line.engine, line.columns) for line in lines], now_s)


def best_in_lines(options: Sequence[tuple[Line, Term]], policy: Policy, now_s: float) -> list[Place]:
    """The cheapest place of a group in each queue, given its terms there. All queues are worked out together, twice: as they are and with
    the group in the order of deadlines, and then with it at every other place that is worth a try."""
    by_deadline = [candidate_by_deadline(line.columns, term) for line, term in options]
    orders = [(line.engine, line.columns) for line, _ in options]
    orders += [(line.engine, line.with_term(place, term)) for (line, term), place in zip(options, by_deadline, strict=True)]
    worked_out = timelines(orders, now_s)
    before, in_turn = worked_out[: len(options)], worked_out[len(options) :]
    tries: list[tuple[int, int, Columns]] = []
    for number, (line, term) in enumerate(options):
        place = by_deadline[number]
        late = now_s + float(in_turn[number].end_s[place]) - min(term.spread_s, term.work_s) > term.deadline_s
        others = (position for position in candidate_positions(line, term, place, late=late) if position != place)
        tries += [(number, position, line.with_term(position, term)) for position in others]
    tried: list[list[Place]] = [
        [_place(line, place, before[number], in_turn[number], policy)]
        for number, ((line, _), place) in enumerate(zip(options, by_deadline, strict=True))
    ]
    afters = timelines([(options[number][0].engine, columns) for number, _, columns in tries], now_s)
    for (number, position, columns), after in zip(tries, afters, strict=True):
        if not _starves(columns, position, after, policy, now_s):
            tried[number].append(_place(options[number][0], position, before[number], after, policy))
    return [_chosen(line, term, places, policy) for (line, term), places in zip(options, tried, strict=True)]


def _place(line: Line, position: int, before: Timeline, after: Timeline, policy: Policy) -> Place:
    cost = after.cost.weighed(policy) - before.cost.weighed(policy)
    return Place(instance=line.slot.facts.name, position=position, added_cost=cost, end_s=float(after.end_s[position]))


def _chosen(line: Line, term: Term, tried: Sequence[Place], policy: Policy) -> Place:
    """The cheapest; equal ones by their ends, then by the position. The head is displaced only for a stated gain."""
    best = min(tried, key=lambda place: (place.added_cost, place.end_s, place.position))
    if best.position == 0 and line.busy and _displaces(line, term):
        others = [place for place in tried if place.position > 0]
        if others:
            other = min(others, key=lambda place: (place.added_cost, place.end_s, place.position))
            if other.added_cost - best.added_cost < policy.head_gain:
                return other
    return best


def candidate_by_deadline(columns: Columns, term: Term) -> int:
    """Behind the last group of its band or a higher one that comes first by deadline (older groups first among equals)."""
    deadline_s = min(term.deadline_s, FAR_S)
    earlier = (columns.band < term.band) | ((columns.band == term.band) & (columns.deadline_s <= deadline_s))
    places = np.flatnonzero(earlier)
    return int(places[-1]) + 1 if len(places) else 0


def candidate_positions(line: Line, term: Term, by_deadline: int, *, late: bool) -> list[int]:
    """Positions to try, in ascending order, `by_deadline` among them, where the group would end `late`."""
    columns = line.columns
    low = _first(columns.band >= term.band)
    high = _first(columns.band > term.band)
    # A queue that breaks the bands (a requeued group stands at its head) leaves only the place by deadline.
    found = {by_deadline}
    if low <= by_deadline <= high and term.slo_s < math.inf:
        runs = _runs_of(columns, term.model_code, low, high)
        chosen = [run for run in runs if run[1] <= by_deadline][-1:] + [run for run in runs if run[1] > by_deadline][:1] + runs[-1:]
        later = columns.deadline_s > term.deadline_s
        found.update(begin + _first(later[begin:end]) for begin, end in chosen)
        if low == 0 and line.terms and line.engine.model_code == term.model_code != line.terms[0].model_code:
            # The run that is being served is one too, though nobody of it may wait any more.
            found.add(0)
        # Not sorted by deadline (runs were joined): also the first place that a later deadline leaves.
        found.add(low + _first(later[low:high]))
        if late:
            found.add(low)
    if line.busy and 0 in found and _displaces(line, term) and term.band == line.terms[0].band:
        found.add(_first(columns.model != columns.model[0]))
    return sorted(found)


def _first(mask: NDArray[np.bool_]) -> int:
    """The first place where a mask holds; its length where it holds nowhere."""
    return int(mask.argmax()) if mask.any() else len(mask)


def _runs_of(columns: Columns, model_code: int, low: int, high: int) -> list[tuple[int, int]]:
    """[begin, end) of the runs of a model inside a band."""
    edges = np.diff((columns.model[low:high] == model_code).astype(np.int8), prepend=0, append=0)
    begins, ends = np.flatnonzero(edges == 1) + low, np.flatnonzero(edges == -1) + low
    return [(int(begin), int(end)) for begin, end in zip(begins, ends, strict=True)]


def _displaces(line: Line, term: Term) -> bool:
    """In front of the head it would change what the engine does next: another model, for the sake of its own band."""
    head = line.terms[0]
    return head.band <= term.band and term.model not in (head.model, line.engine.active_model)


def _starves(columns: Columns, position: int, after: Timeline, policy: Policy, now_s: float) -> bool:
    """A group of the same band with an earlier deadline, now behind, would end later than the bound of its last request."""
    behind = slice(position + 1, None)
    deadline_s = columns.deadline_s[behind]
    overtaken = (columns.band[behind] == columns.band[position]) & (deadline_s <= columns.deadline_s[position])
    overtaken &= columns.count[behind] > 0
    beyond = now_s + after.end_s[behind] > deadline_s + columns.spread_s[behind] + policy.starvation_slos * columns.slo_s[behind]
    return bool((overtaken & beyond).any())
