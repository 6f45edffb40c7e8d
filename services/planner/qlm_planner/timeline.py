"""When the groups of one virtual queue would be served, and what that costs: the objective of the plan, in closed form on arrays.

The times are those of `qlm_core.queue_model`, the one model of a virtual queue; what a request costs beside its wait is kept with its group
(`Term`), so that trying an order does not work it out anew. Cost (design, "The planner"):

    late_weight * expected late requests + tardiness_weight * expected tardiness + work_weight * seconds of swapping
        + completion_weight * request-seconds until completion

with E[X+] = mean Phi(z) + deviation phi(z) for a normal X.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from qlm_core.clearing import Head, would_clear
from qlm_core.queue_model import (
    DECODE,
    PREFILL,
    SEATS,
    SUMS,
    VARIANCE,
    Leads,
    QueueColumns,
    RunWaits,
    run_starts,
    run_waits,
)
from qlm_core.run_lengths import ENDS, run_lengths
from qlm_planner.items import TIERS
from qlm_planner.policy import Policy
from qlm_planner.terms import NOTHING, Engine, Term

Floats = NDArray[np.float64]

SHARES = np.array([[0.125], [0.375], [0.625], [0.875]])
"""Points of a group at which lateness is worked out: its requests in four parts."""

WEIGHTS = np.full(len(SHARES), 1.0 / len(SHARES))

FAR_S = 1e12
"""Stands for "no deadline": infinite values would make NaN of a product with 0."""

RELATIVE_DEVIATION = 0.03
"""Of a time, beside what the formulas say of their own error: output lengths drift together while requests wait (ADR 29). What the
estimator learned from clients' predictions is not used here: that holds who was let by later (ADR 38)."""

DEVIATION_MIN_S = 1e-3
INVERSE_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one queue or of a whole plan. `swaps`: model changes; `swap_s`: their seconds, but for the first load of an empty engine, which
    keeps nobody waiting and has to come anyway. `redo_s`: of requests that give way, doing again what they lose. Requests count by their
    tenants' weights in `tardiness_s` and, beyond one each, in `late_extra` (below 0 where they count for less)."""

    late: float = 0.0
    late_extra: float = 0.0
    tardiness_s: float = 0.0
    swap_s: float = 0.0
    swaps: int = 0
    redo_s: float = 0.0
    completion_s: float = 0.0

    def weighed(self, policy: Policy) -> float:
        return (
            policy.late_weight * (self.late + self.late_extra)
            + policy.tardiness_weight * self.tardiness_s
            + policy.work_weight * (self.swap_s + self.redo_s)
            + policy.completion_weight * self.completion_s
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            late=self.late + other.late,
            late_extra=self.late_extra + other.late_extra,
            tardiness_s=self.tardiness_s + other.tardiness_s,
            swap_s=self.swap_s + other.swap_s,
            swaps=self.swaps + other.swaps,
            redo_s=self.redo_s + other.redo_s,
            completion_s=self.completion_s + other.completion_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times of the groups of one order, in seconds from now. `end_s`, `end_variance`: completion of the whole group. `clears`:
    what runs is expected to give way to the head; the cost is that of the order beyond what they would cost if they went on."""

    cost: Cost
    clears: bool = False
    start_s: Floats
    end_s: Floats
    end_variance: Floats


NOTHING_TO_DO = Timeline(cost=Cost(), start_s=np.zeros(0), end_s=np.zeros(0), end_variance=np.zeros(0))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The terms of one order as an array: a row for each of the fields below, a column for each group."""

    rows: Floats

    @classmethod
    def of(cls, terms: Sequence[Term], warm_models: Sequence[str]) -> Columns:
        made = [_column(term, warm_models) for term in terms]
        return cls(np.array(made).T if made else np.zeros((FIELDS, 0)))

    def inserted(self, position: int, term: Term, warm_models: Sequence[str]) -> Columns:
        """The order with one more group."""
        new = np.array(_column(term, warm_models)).reshape(FIELDS, 1)
        return Columns(np.concatenate((self.rows[:, :position], new, self.rows[:, position:]), axis=1))

    @property
    def band(self) -> Floats:
        return self._row(BAND)

    @property
    def deadline_s(self) -> Floats:
        return self._row(DEADLINE)

    @property
    def spread_s(self) -> Floats:
        return self._row(SPREAD)

    @property
    def slo_s(self) -> Floats:
        return self._row(SLO)

    @property
    def count(self) -> Floats:
        return self._row(COUNT)

    @property
    def model(self) -> Floats:
        return self._row(MODEL)

    def _row(self, number: int) -> Floats:
        row: Floats = self.rows[number]
        return row


(OWN, OWN_VARIANCE, COUNT, DEADLINE, SPREAD, DRAIN, SWAP, WARM, MODEL, BAND, SLO, WORK, WEIGHT, DUE_SHARE) = range(
    SUMS + ENDS, SUMS + ENDS + 14
)
"""Rows behind those of what adds up along a queue, and of what ends a run."""
FIELDS = OWN + 14


def _column(term: Term, warm_models: Sequence[str]) -> tuple[float, ...]:
    return (
        *term.each,
        *term.ends,
        term.own_s,
        term.own_variance,
        term.count,
        min(term.deadline_s, FAR_S),
        term.spread_s,
        term.drain_s,
        term.warm_s if term.model in warm_models else term.cold_s,
        term.warm_s,
        term.model_code,
        term.band,
        min(term.slo_s, FAR_S),
        term.work_s,
        term.weight,
        term.due_share,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """An order to be worked out: `engine` and `rows` with those that give way among the groups, at [`begin`, `end`) (empty: nobody
    does)."""

    engine: Engine
    rows: Floats
    begin: int = 0
    end: int = 0


def timeline(engine: Engine, columns: Columns, now_s: float) -> Timeline:
    """Works an order out: O(groups). The engine first does what it does now, unless that gives way to the head."""
    return timelines([(engine, columns)], now_s)[0]


def timelines(orders: Sequence[tuple[Engine, Columns]], now_s: float) -> list[Timeline]:
    """Works many orders out in one pass, as if each queue had nothing to do with the others: trying places costs little more than one."""
    found = [NOTHING_TO_DO] * len(orders)
    busy = [number for number, (_, columns) in enumerate(orders) if columns.rows.shape[1]]
    if busy:
        prepared = [_prepared(orders[number][0], orders[number][1].rows, now_s) for number in busy]
        for number, order, made in zip(busy, prepared, _in_turn(prepared, now_s), strict=True):
            found[number] = made if order.begin == order.end else _without_victims(order, orders[number][0], made, now_s)
    return found


def _prepared(engine: Engine, rows: Floats, now_s: float) -> _Order:
    """What gives way comes back behind the head: where its model is served next, or else right behind the head's run. Its model is taken to
    be on disk by then."""
    model = rows[MODEL]
    if not engine.runners or model[0] == engine.model_code or engine.way is None:
        return _Order(engine=engine, rows=rows)
    if not would_clear(engine.runners, engine.drain_s, engine.way, _head(rows), now_s):
        return _Order(engine=engine, rows=rows)
    behind_head = int(np.argmax(model != model[0])) if (model != model[0]).any() else len(model)
    same = np.flatnonzero(model[behind_head:] == engine.model_code)
    at = behind_head + int(same[0]) if len(same) else behind_head
    victims = np.array([_column(runner, ()) for runner in engine.runners]).T
    return _Order(
        engine=replace(engine, left=NOTHING, drain_s=0.0, drain_variance=0.0, runners=()),
        rows=np.concatenate((rows[:, :at], victims, rows[:, at:]), axis=1),
        begin=at,
        end=at + victims.shape[1],
    )


def _without_victims(order: _Order, engine: Engine, made: Timeline, now_s: float) -> Timeline:
    """The groups alone, and the cost beyond what those that give way would cost if they went on."""
    assert engine.way is not None, "nothing gives way that does not run"
    runs_left_s = engine.way.runs_left_s
    victims = order.rows[:, order.begin : order.end]
    count = victims[COUNT]
    weighed = count * victims[WEIGHT]
    deviation = np.sqrt(victims[OWN_VARIANCE])
    late, tardiness = _lateness(
        np.broadcast_to(runs_left_s - (victims[DEADLINE] - now_s), (len(SHARES), len(count))), np.maximum(deviation, DEVIATION_MIN_S)
    )
    cost = replace(
        made.cost,
        late=made.cost.late - float(count @ late),
        late_extra=made.cost.late_extra - float((weighed - count) @ late),
        tardiness_s=made.cost.tardiness_s - float(weighed @ tardiness),
        redo_s=float(count.sum()) * engine.way.displacement_s,
        completion_s=made.cost.completion_s - float(count.sum()) * runs_left_s,
    )
    others = np.r_[0 : order.begin, order.end : len(made.start_s)]
    return Timeline(
        cost=cost,
        clears=True,
        start_s=made.start_s[others],
        end_s=made.end_s[others],
        end_variance=made.end_variance[others],
    )


def _head(rows: Floats) -> Head:
    """As its agent sees it, which knows bands and deadlines but no tiers."""
    deadline_s = float(rows[DEADLINE, 0])
    return Head(
        band=int(rows[BAND, 0]) // TIERS,
        deadline_s=deadline_s if deadline_s < FAR_S else math.inf,
        requests=int(rows[COUNT, 0]),
        service_s=float(rows[SWAP, 0] + rows[OWN, 0]),
    )


def _in_turn(orders: Sequence[_Order], now_s: float) -> list[Timeline]:
    """The groups of each order one after the other, behind what runs. Every order has a group."""
    rows = orders[0].rows if len(orders) == 1 else np.concatenate([order.rows for order in orders], axis=1)
    bounds = np.zeros(len(orders) + 1, dtype=np.int64)
    np.add.accumulate([order.rows.shape[1] for order in orders], out=bounds[1:])
    first = bounds[:-1]
    each, count = rows[:SUMS], rows[COUNT]
    columns = QueueColumns(first=first, each=each, count=count, model=rows[MODEL], swap_s=rows[SWAP], warm_s=rows[WARM])
    leads = _leads([order.engine for order in orders])
    waits = run_waits(columns, leads)
    ended = waits.wait_s[1] + rows[DRAIN]
    ended_variance = waits.wait_variance[1] + rows[OWN_VARIANCE]
    lengths = run_lengths(columns, leads, waits, rows[SUMS : SUMS + ENDS], ended_variance)
    starts, variances, swaps = run_starts(columns, leads, waits, *lengths)
    start, variance = starts.take(waits.run), variances.take(waits.run)
    served, spread = _along(each, waits, count)
    served += start + rows[OWN]
    spread += variance + rows[OWN_VARIANCE]
    spread += _unexplained(served)
    due = rows[DEADLINE] + SHARES * rows[SPREAD] - now_s
    late, tardiness = _lateness(served - due, np.maximum(np.sqrt(spread), DEVIATION_MIN_S))
    weight = rows[WEIGHT]
    late *= rows[DUE_SHARE]
    tardiness *= rows[DUE_SHARE]
    each_of = np.array((late, (weight - 1.0) * late, weight * tardiness, WEIGHTS @ served))
    sums = np.add.reduceat(count * each_of, first, axis=1).T.tolist()
    start_s = start + waits.wait_s[0]
    end_s = start + ended
    end_variance = variance + ended_variance + _unexplained(end_s)
    runs = np.append(waits.queue_run, swaps.size).tolist()
    ends = bounds.tolist()
    return [
        Timeline(
            cost=_cost(order.engine, sums[number], swaps[runs[number] : runs[number + 1]], bool(waits.goes_on[number])),
            start_s=start_s[ends[number] : ends[number + 1]],
            end_s=end_s[ends[number] : ends[number + 1]],
            end_variance=end_variance[ends[number] : ends[number + 1]],
        )
        for number, order in enumerate(orders)
    ]


def _cost(engine: Engine, sums: Sequence[float], swaps: Floats, goes_on: bool) -> Cost:
    late, late_extra, tardiness_s, completion_s = sums
    swap_s = float(swaps.sum())
    return Cost(
        late=late,
        late_extra=late_extra,
        tardiness_s=tardiness_s,
        swap_s=swap_s if engine.active_model else swap_s - float(swaps[0]),
        swaps=swaps.size - int(goes_on),
        completion_s=completion_s,
    )


def _leads(engines: Sequence[Engine]) -> Leads:
    told = np.array([(*engine.left, engine.model_code, engine.drain_s, engine.drain_variance) for engine in engines], dtype=np.float64).T
    return Leads(left=told[:SUMS], model=told[SUMS], drain_s=told[SUMS + 1], drain_variance=told[SUMS + 2])


def _along(each: Floats, waits: RunWaits, count: Floats) -> tuple[Floats, Floats]:
    """Waits since the start of the run at the points of each group, and their variances. In the mean: what the positive part of a normal
    adds is nothing where queues are long enough for their order to matter."""
    place = SHARES * count
    ahead = waits.ahead
    in_flight = waits.in_flight_s[0] + SHARES * (waits.in_flight_s[1] - waits.in_flight_s[0])
    seat = np.maximum(0.0, ahead[DECODE] + place * each[DECODE] - in_flight)
    seat *= ahead[SEATS] + place * each[SEATS] > 1.0
    return ahead[PREFILL] + place * each[PREFILL] + seat, ahead[VARIANCE] + place * each[VARIANCE]


def _unexplained(time_s: Floats) -> Floats:
    """Variance that the formulas leave out."""
    found: Floats = np.square(RELATIVE_DEVIATION * np.maximum(time_s, 0.0))
    return found


def _lateness(gap_s: Floats, deviation_s: Floats) -> tuple[Floats, Floats]:
    """P(late) and expected tardiness of each group, as means over its points."""
    z = gap_s / deviation_s
    above = ndtr(z)
    density = INVERSE_SQRT_2PI * np.exp(-0.5 * z * z)
    excess = np.maximum(0.0, gap_s * above + deviation_s * density)
    return WEIGHTS @ above, WEIGHTS @ excess
