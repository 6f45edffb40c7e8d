"""A plan under construction: the runs of each queue, in time by their means, with the slack of everything behind each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.compiled import compiled, lean
from qlm_planner.solver.packing import DEADLINE, DRAIN, DRAIN_LEAD, LEAD, OWN, REQUESTS, SPREAD, WORK, Packed
from qlm_planner.solver.problem import Floats, Integers


class Draft(NamedTuple):
    """Queues: `free` (until the last group's work is done), `drain` (its), `active` (the model by then), `tail` (its last run, -1 for
    none). `last` [M, Q]: the last run of each model. Runs, numbered as they come: `model`, `band`, `end`, `slack` (the least time until a
    group of it is late), `requests`, `before` and `behind` (runs of the same queue), `first` and `final` (groups); `slack_from`,
    `requests_from`: of the run and all behind it. `behind_group`: the next of a run. `runs`: how many there are."""

    free: Floats
    drain: Floats
    active: Integers
    tail: Integers
    last: Integers
    model: Integers
    band: Integers
    end: Floats
    slack: Floats
    requests: Floats
    before: Integers
    behind: Integers
    first: Integers
    final: Integers
    slack_from: Floats
    requests_from: Floats
    behind_group: Integers
    runs: Integers


@compiled
def empty_draft(packed: Packed) -> Draft:
    """Nothing is planned yet; the engines do what they do."""
    queues, size, models = len(packed.kind), len(packed.model) + 1, packed.swap.shape[1]
    free = np.empty(queues)
    for queue in range(queues):
        free[queue] = packed.queue[queue, LEAD] if packed.active[queue] >= 0 else packed.queue[queue, DRAIN_LEAD]
    return Draft(
        free,
        np.zeros(queues),
        packed.active.copy(),
        np.full(queues, -1, dtype=np.int32),
        np.full((models, queues), -1, dtype=np.int32),
        np.empty(size, dtype=np.int32),
        np.empty(size, dtype=np.int32),
        np.empty(size),
        np.empty(size),
        np.empty(size),
        np.empty(size, dtype=np.int32),
        np.empty(size, dtype=np.int32),
        np.empty(size, dtype=np.int32),
        np.empty(size, dtype=np.int32),
        np.empty(size),
        np.empty(size),
        np.full(size, -1, dtype=np.int32),
        np.zeros(1, dtype=np.int32),
    )


@lean
def begin_s(draft: Draft, packed: Packed, queue: int, model: int) -> tuple[float, float]:
    """When a group of the model would start at the end of the queue, and the seconds of swapping before it."""
    if draft.active[queue] == model:
        return draft.free[queue], 0.0
    swap_s = packed.swap[queue, model]
    return max(draft.free[queue] + draft.drain[queue], packed.queue[queue, DRAIN_LEAD]) + swap_s, swap_s


@lean
def slack_s(packed: Packed, kind: int, group: int, end_s: float, lost_absorb: bool) -> float:
    """Until a request of the group that ends then is late. Infinite for one that is late already, where that stands in nobody's way."""
    on_kind, row = packed.on_kind[kind, group], packed.group[group]
    slack = row[DEADLINE] - end_s - on_kind[OWN] + min(row[SPREAD], on_kind[WORK])
    return np.inf if lost_absorb and slack < 0.0 else slack


@lean
def append(draft: Draft, packed: Packed, queue: int, group: int, lost_absorb: bool) -> None:
    """At the end of the queue."""
    kind, model, band = packed.kind[queue], packed.model[group], packed.band[group]
    start_s, _ = begin_s(draft, packed, queue, model)
    end_s = start_s + packed.on_kind[kind, group, WORK]
    run = draft.tail[queue]
    if run < 0 or draft.model[run] != model or draft.band[run] != band:
        run = draft.runs[0]
        draft.runs[0] += 1
        draft.model[run], draft.band[run] = model, band
        draft.slack[run], draft.requests[run] = np.inf, 0.0
        draft.before[run], draft.behind[run] = draft.tail[queue], -1
        draft.first[run], draft.final[run] = -1, -1
        if draft.tail[queue] >= 0:
            draft.behind[draft.tail[queue]] = run
        draft.tail[queue] = run
        draft.last[model, queue] = run
    _add(draft, packed, run, group, end_s, slack_s(packed, kind, group, end_s, lost_absorb))
    draft.free[queue] = end_s
    draft.drain[queue] = packed.on_kind[kind, group, DRAIN]
    draft.active[queue] = model


@lean
def join(draft: Draft, packed: Packed, queue: int, run: int, group: int, lost_absorb: bool) -> None:
    """At the end of a run that others follow: they wait longer."""
    kind = packed.kind[queue]
    work_s = packed.on_kind[kind, group, WORK]
    behind = draft.behind[run]
    while behind >= 0:
        draft.end[behind] += work_s
        draft.slack[behind] -= work_s
        draft.slack_from[behind] -= work_s
        behind = draft.behind[behind]
    draft.free[queue] += work_s
    end_s = draft.end[run] + work_s
    _add(draft, packed, run, group, end_s, slack_s(packed, kind, group, end_s, lost_absorb))


@lean
def _add(draft: Draft, packed: Packed, run: int, group: int, end_s: float, slack: float) -> None:
    draft.end[run] = end_s
    draft.slack[run] = min(draft.slack[run], slack)
    draft.requests[run] += packed.group[group, REQUESTS]
    if draft.first[run] < 0:
        draft.first[run] = group
    else:
        draft.behind_group[draft.final[run]] = group
    draft.final[run] = group
    while run >= 0:
        behind = draft.behind[run]
        draft.slack_from[run] = draft.slack[run] if behind < 0 else min(draft.slack[run], draft.slack_from[behind])
        draft.requests_from[run] = draft.requests[run] + (0.0 if behind < 0 else draft.requests_from[behind])
        run = draft.before[run]


@compiled
def orders_of(draft: Draft) -> tuple[NDArray[np.int64], Integers]:
    """The groups in the order of service: where each queue begins, and the groups."""
    queues = len(draft.tail)
    first = np.zeros(queues + 1, dtype=np.int64)
    groups = np.empty(len(draft.behind_group), dtype=np.int32)
    placed = 0
    for queue in range(queues):
        run = draft.tail[queue]
        while run >= 0 and draft.before[run] >= 0:
            run = draft.before[run]
        while run >= 0:
            group = draft.first[run]
            while group >= 0:
                groups[placed] = group
                placed += 1
                group = draft.behind_group[group]
            run = draft.behind[run]
        first[queue + 1] = placed
    return first, groups[:placed].copy()
