"""When the groups of one virtual queue would be served, and what that costs: the objective of the plan, in closed form on arrays.

The same model of a queue as `qlm_core.prediction_queue`: groups of one model in a row share the batch, a full batch takes in `credit_s` of
work at once, and where the model changes all that runs must end before the new weights come in. Cost (design, "The planner"):

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

from qlm_planner.clearing import Head, would_clear
from qlm_planner.estimates import Engine, Term
from qlm_planner.policy import Policy

Floats = NDArray[np.float64]

SHARES = np.array([[0.125], [0.375], [0.625], [0.875]])
"""Points of a group at which lateness is worked out: its requests in four parts."""

FAR_S = 1e12
"""Stands for "no deadline": infinite values would make NaN of a product with 0."""

DEVIATION_MIN_S = 1e-3
INVERSE_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one queue or of a whole plan. `swaps`: model changes; `swap_s`: their seconds, but for the first load of an empty engine, which
    keeps nobody waiting and has to come anyway. `redo_s`: of requests that give way, doing again what they lose."""

    late: float = 0.0
    tardiness_s: float = 0.0
    swap_s: float = 0.0
    swaps: int = 0
    redo_s: float = 0.0
    completion_s: float = 0.0

    def weighed(self, policy: Policy) -> float:
        return (
            policy.late_weight * self.late
            + policy.tardiness_weight * self.tardiness_s
            + policy.work_weight * (self.swap_s + self.redo_s)
            + policy.completion_weight * self.completion_s
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            late=self.late + other.late,
            tardiness_s=self.tardiness_s + other.tardiness_s,
            swap_s=self.swap_s + other.swap_s,
            swaps=self.swaps + other.swaps,
            redo_s=self.redo_s + other.redo_s,
            completion_s=self.completion_s + other.completion_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times of the groups of one order, in seconds from now. `end_s`, `end_variance`: completion of the whole group. `clears`: what runs
    is expected to give way to the head; the cost is that of the order beyond what they would cost if they went on."""

    cost: Cost
    clears: bool = False
    start_s: Floats
    end_s: Floats
    end_variance: Floats


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


(WORK, WORK_VARIANCE, OWN, OWN_VARIANCE, COUNT, DEADLINE, CREDIT, DRAIN, SWAP, WARM, MODEL, BAND, SLO) = range(13)
FIELDS = 13


def _column(term: Term, warm_models: Sequence[str]) -> tuple[float, ...]:
    return (
        term.work_s,
        term.work_variance,
        term.own_s,
        term.own_variance,
        term.count,
        min(term.deadline_s, FAR_S),
        term.credit_s,
        term.drain_s,
        term.warm_s if term.model in warm_models else term.cold_s,
        term.warm_s,
        term.model_code,
        term.band,
        min(term.slo_s, FAR_S),
    )


def timeline(engine: Engine, columns: Columns, now_s: float) -> Timeline:
    """Works an order out: O(groups). The engine first does what it does now, unless that gives way to the head."""
    rows = columns.rows
    if rows.shape[1] == 0:
        nothing = np.zeros(0)
        return Timeline(cost=Cost(), start_s=nothing, end_s=nothing, end_variance=nothing)
    if engine.runners and rows[MODEL, 0] != engine.model_code and would_clear(engine, _head(rows), now_s):
        return _cleared(engine, rows, now_s)
    return _in_turn(engine, rows, now_s)


def _head(rows: Floats) -> Head:
    deadline_s = float(rows[DEADLINE, 0])
    return Head(
        band=int(rows[BAND, 0]),
        deadline_s=deadline_s if deadline_s < FAR_S else math.inf,
        requests=int(rows[COUNT, 0]),
        service_s=float(rows[SWAP, 0] + rows[OWN, 0]),
    )


def _cleared(engine: Engine, rows: Floats, now_s: float) -> Timeline:
    """What runs comes back behind the head: where its model is served next, or else right behind the head's run. Its model is taken to be
    on disk by then."""
    model = rows[MODEL]
    behind_head = int(np.argmax(model != model[0])) if (model != model[0]).any() else len(model)
    same = np.flatnonzero(model[behind_head:] == engine.model_code)
    at = behind_head + int(same[0]) if len(same) else behind_head
    victims = np.array([_column(runner, ()) for runner in engine.runners]).T
    until = at + victims.shape[1]
    made = _in_turn(
        replace(engine, left_s=0.0, drain_s=engine.clear_s, runners=()),
        np.concatenate((rows[:, :at], victims, rows[:, at:]), axis=1),
        now_s,
    )
    count = victims[COUNT]
    deviation = np.sqrt(victims[OWN_VARIANCE])
    late, tardiness = _lateness(engine.runs_left_s - (victims[DEADLINE] - now_s)[None, :], np.maximum(deviation, DEVIATION_MIN_S))
    cost = replace(
        made.cost,
        late=made.cost.late - float(count @ late),
        tardiness_s=made.cost.tardiness_s - float(count @ tardiness),
        redo_s=float(count.sum()) * engine.displacement_s,
        completion_s=made.cost.completion_s - float(count.sum()) * engine.runs_left_s,
    )
    others = np.r_[0:at, until : len(made.start_s)]
    return Timeline(
        cost=cost,
        clears=True,
        start_s=made.start_s[others],
        end_s=made.end_s[others],
        end_variance=made.end_variance[others],
    )


def _in_turn(engine: Engine, rows: Floats, now_s: float) -> Timeline:
    """The groups one after the other, behind what runs."""
    work, count, model = rows[WORK], rows[COUNT], rows[MODEL]
    first = np.concatenate(([0], np.flatnonzero(model[1:] != model[:-1]) + 1))
    last = np.append(first[1:], len(model)) - 1
    run_of = np.repeat(np.arange(len(first)), last - first + 1)
    goes_on = bool(model[0] == engine.model_code)
    lead = np.zeros(len(first))
    lead[0] = engine.left_s if goes_on else 0.0
    done = np.cumsum(work)
    before_run = done[first] - work[first]
    credit = rows[CREDIT][first]
    length = np.maximum(0.0, done[last] - before_run + lead - credit) + rows[DRAIN][last]
    swap = rows[SWAP][first]
    warm = rows[WARM][first]
    # What is on disk comes to host memory while the run before is served.
    swap[1:] = np.maximum(warm[1:], swap[1:] - length[:-1])
    free_s = 0.0
    if goes_on:
        swap[0] = 0.0
    else:
        free_s = engine.drain_s
        swap[0] = max(warm[0], swap[0] - engine.drain_s)
    base = (free_s + np.cumsum(swap) + np.cumsum(length) - length)[run_of]
    # Work that a request of the group still waits for, beyond what a full batch takes in.
    ahead = (done - work) - before_run[run_of] + (lead - credit)[run_of]
    variance_ahead = np.cumsum(rows[WORK_VARIANCE]) - rows[WORK_VARIANCE]
    deviation = np.sqrt(variance_ahead + SHARES * rows[WORK_VARIANCE] + rows[OWN_VARIANCE])
    served = base + np.maximum(0.0, ahead + SHARES * work) + rows[OWN]
    late, tardiness = _lateness(served - (rows[DEADLINE] - now_s), np.maximum(deviation, DEVIATION_MIN_S))
    cost = Cost(
        late=float(count @ late),
        tardiness_s=float(count @ tardiness),
        swap_s=float(swap.sum() - (swap[0] if not engine.active_model else 0.0)),
        swaps=len(first) - int(goes_on),
        completion_s=float(count @ served.mean(axis=0)),
    )
    return Timeline(
        cost=cost,
        start_s=base + np.maximum(0.0, ahead),
        end_s=base + np.maximum(0.0, ahead + work) + rows[DRAIN],
        end_variance=variance_ahead + rows[WORK_VARIANCE] + rows[OWN_VARIANCE],
    )


def _lateness(gap_s: Floats, deviation_s: Floats) -> tuple[Floats, Floats]:
    """P(late) and expected tardiness of each group, as means over its points."""
    z = gap_s / deviation_s
    above = ndtr(z)
    density = INVERSE_SQRT_2PI * np.exp(-0.5 * z * z)
    excess = np.maximum(0.0, gap_s * above + deviation_s * density)
    return above.mean(axis=0), excess.mean(axis=0)
