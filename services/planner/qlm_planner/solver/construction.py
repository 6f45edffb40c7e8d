"""A whole plan at once: list scheduling by earliest deadline, by several rules.

Each group in turn takes the cheapest of: the end of a queue, or the last run of its model on a queue where all that is behind it can wait
for it (so no swap). Works with means; what comes out is judged by the whole objective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlm_planner.solver.compiled import compiled, lean
from qlm_planner.solver.draft import Draft, append, begin_s, empty_draft, join, orders_of
from qlm_planner.solver.packing import COMPLETION, DEADLINE, LATE, OWN, REQUESTS, SPREAD, TARDINESS, WORK, WORK_WEIGHT, Packed
from qlm_planner.solver.problem import Integers

LATE_SHARE_MAX = 0.5
"""A group of which a larger share would be late is kept back, where the rule has it so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One construction. `swap_factor`: what a second of swapping counts, over its weight. `lost_absorb`: groups that are late already do
    not stand in the way of a join (under overload nobody has slack, and plain deadline order would swap at every group). `keeps_back`: what
    would be late comes after all of its band that would not. `by_finish`: the queue with the earliest finish, and no joins: EDF."""

    name: str
    swap_factor: float = 1.0
    lost_absorb: bool = False
    keeps_back: bool = False
    by_finish: bool = False


EDF = Rule(name="edf", by_finish=True)
PORTFOLIO = (
    EDF,
    Rule(name="join"),
    Rule(name="join, free swaps", swap_factor=0.0),
    Rule(name="join late", lost_absorb=True),
    Rule(name="join late, dear swaps", swap_factor=3.0, lost_absorb=True),
    Rule(name="keep back", lost_absorb=True, keeps_back=True),
)


def constructions(packed: Packed, rules: tuple[Rule, ...] = PORTFOLIO) -> Iterator[tuple[str, NDArray[np.int64], Integers]]:
    """By each rule: its name, where each queue begins, and the groups in order."""
    turn = np.lexsort((packed.group[:, DEADLINE], packed.band)).astype(np.int32)
    for rule in rules:
        first, groups = _construct(packed, turn, rule.swap_factor, rule.lost_absorb, rule.keeps_back, rule.by_finish)
        yield rule.name, first, groups


@compiled
def _construct(
    packed: Packed, turn: Integers, swap_factor: float, lost_absorb: bool, keeps_back: bool, by_finish: bool
) -> tuple[NDArray[np.int64], Integers]:
    draft = empty_draft(packed)
    band_first = np.iinfo(np.int32).max
    if len(turn):
        band_first = packed.band[turn[0]]
    seated = np.zeros(len(turn), dtype=np.bool_)
    for queue in range(len(packed.kind)):
        head = packed.head[queue]
        # A head gives way to a higher band, which may come to this queue.
        if head >= 0 and packed.serves[packed.kind[queue], head] and packed.band[head] == band_first:
            append(draft, packed, queue, head, lost_absorb)
            seated[head] = True
    back = np.empty(len(turn), dtype=np.int32)
    begin = 0
    while begin < len(turn):
        end, backs = begin, 0
        while end < len(turn) and packed.band[turn[end]] == packed.band[turn[begin]]:
            group = turn[end]
            end += 1
            if seated[group]:
                continue
            queue, run, share = _best(draft, packed, group, swap_factor, by_finish)
            if keeps_back and share > LATE_SHARE_MAX:
                back[backs] = group
                backs += 1
            else:
                _put(draft, packed, queue, run, group, lost_absorb)
        for number in range(backs):
            queue, run, _ = _best(draft, packed, back[number], swap_factor, by_finish)
            _put(draft, packed, queue, run, back[number], lost_absorb)
        begin = end
    return orders_of(draft)


@lean
def _put(draft: Draft, packed: Packed, queue: int, run: int, group: int, lost_absorb: bool) -> None:
    if queue >= 0 and run >= 0:
        join(draft, packed, queue, run, group, lost_absorb)
    elif queue >= 0:
        append(draft, packed, queue, group, lost_absorb)


@lean
def _best(draft: Draft, packed: Packed, group: int, swap_factor: float, by_finish: bool) -> tuple[int, int, float]:
    """The queue (-1 where none can serve it), the run to join there (-1 for the end), and the share that would be late."""
    model, band = packed.model[group], packed.band[group]
    best_queue, best_run, best_share, best_value, best_end_s = -1, -1, 0.0, np.inf, np.inf
    for queue in range(len(packed.kind)):
        kind = packed.kind[queue]
        if not packed.serves[kind, group]:
            continue
        work_s = packed.on_kind[kind, group, WORK]
        start_s, swap_s = begin_s(draft, packed, queue, model)
        end_s = start_s + work_s
        value, share = end_s, 0.0
        if not by_finish:
            value, share = _expected(packed, kind, group, end_s)
            value += swap_factor * packed.weights[WORK_WEIGHT] * swap_s
        if value < best_value or (value == best_value and end_s < best_end_s):
            best_queue, best_run, best_share, best_value, best_end_s = queue, -1, share, value, end_s
        run = draft.last[model, queue]
        if by_finish or run < 0 or run == draft.tail[queue] or draft.band[run] != band:
            continue
        behind = draft.behind[run]
        if draft.slack_from[behind] < work_s or draft.band[draft.tail[queue]] != band:
            continue
        end_s = draft.end[run] + work_s
        value, share = _expected(packed, kind, group, end_s)
        # Those behind wait longer for it.
        value += packed.weights[COMPLETION] * draft.requests_from[behind] * work_s
        if value < best_value or (value == best_value and end_s < best_end_s):
            best_queue, best_run, best_share, best_value, best_end_s = queue, run, share, value, end_s
    return best_queue, best_run, best_share


@lean
def _expected(packed: Packed, kind: int, group: int, end_s: float) -> tuple[float, float]:
    """Cost of a group that ends then, by its mean, and its late share: its requests end evenly over its work."""
    work_s, spread_s = packed.on_kind[kind, group, WORK], packed.group[group, SPREAD]
    done_s = end_s + packed.on_kind[kind, group, OWN]
    last_over_s = done_s - packed.group[group, DEADLINE] - spread_s
    first_over_s = last_over_s - work_s + spread_s
    high, low = max(last_over_s, first_over_s), min(last_over_s, first_over_s)
    cost, share = packed.weights[COMPLETION] * (done_s - 0.5 * work_s), 0.0
    if low >= 0.0 and high > 0.0:
        share = 1.0
        cost += packed.weights[LATE] + packed.weights[TARDINESS] * 0.5 * (low + high)
    elif high > 0.0:
        share = high / (high - low)
        cost += share * (packed.weights[LATE] + packed.weights[TARDINESS] * 0.5 * high)
    return packed.group[group, REQUESTS] * cost, share
