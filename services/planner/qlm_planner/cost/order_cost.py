"""The cost of orders: the objective of the plan (design, "The planner"), for many virtual queues in one pass over arrays.

Consecutive groups of one model are a *run*. A group starts when the work ahead in its run is done; a run starts when the run before has
drained and its model, warmed during that run, is loaded; the first run follows the engine's running requests. Inputs are columns
(`service_times`), times are seconds from now. Each request has its own deadline, so lateness is computed at four points of a group, with
E[X+] = mean Phi(z) + deviation phi(z) for a normal X:

    late * expected late requests + tardiness * expected tardiness + work * seconds of swapping
        + completion * request-seconds until completion + evictions + misses of absent models (`absence`)

`search.order_state.walk` computes the same cost group by group for the search; tests compare both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from qlm_planner.cost.absence import Absences
from qlm_planner.search.problem import Costs, Weights

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

(WORK, WORK_VARIANCE, OWN, OWN_VARIANCE, DRAIN) = range(5)
"""Rows of a group on its queue: engine time of all its requests and its variance; a request's time from its start to the event that its SLO
bounds, and its variance; time from the group's last start to its last end."""
(REQUESTS, DEADLINE, SPREAD, SWAP, WARM, MODEL, BAND, COUNT, SLO) = range(5, 14)
"""Weighted requests; the first deadline, and the spread to the last; seconds to activate its model from its present place and from host
memory; the model's number; the rank; waiting requests; the SLO."""
GROUP_ROWS = 14

(LEAD, LEAD_VARIANCE, DRAIN_LEAD, DRAIN_LEAD_VARIANCE, CLEAR_COST, LEAVE_COST, ACTIVE) = range(7)
"""Rows of a queue: time until a new request of the active model starts; time until all running requests have ended; cost of evicting them,
and of serving another model first; the number of the active model (-1 for none)."""
QUEUE_ROWS = 7
FAR_S = 1e12
"""Stands for "no deadline": infinity times 0 is NaN."""
SHARES = np.array([[0.125], [0.375], [0.625], [0.875]])
"""Points of a group at which lateness is computed, each for a quarter of its requests."""
VARIANCE_MIN = 1e-6
INVERSE_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderTimes:
    """Times of the groups [groups], in seconds from now: `start_s` of the first request, `end_s` and `end_variance` of the last end;
    `late`: the expected share of late requests; `latest_s`: when the latest request reaches its SLO's event, less the deadlines' spread.
    `parts` [PARTS, queues]: the cost of each queue."""

    start_s: Floats
    end_s: Floats
    end_variance: Floats
    late: Floats
    latest_s: Floats
    parts: Floats

    def costs(self, queues: slice = slice(None)) -> Costs:
        """The sum over some queues."""
        found = dict(zip((each.name for each in fields(Costs)), self.parts[:, queues].sum(axis=1).tolist(), strict=True))
        return Costs(**{**found, "swaps": round(found["swaps"])})


(LATE, TARDINESS, SWAP_S, SWAPS, REDO, MISSED, COMPLETION, TOTAL) = range(8)
"""Parts of a queue's cost, in the order of `Costs`."""
PARTS = 8


def order_times(rows: Floats, queue: Integers, engines: Floats, weights: Weights, absences: Absences | None = None) -> OrderTimes:
    """Times and costs of orders. `rows` [GROUP_ROWS, groups]: queue after queue, each in order; `queue` [groups]: their queues, ascending;
    `engines` [QUEUE_ROWS, queues]; `absences`: of the queues, if they count. O(groups)."""
    parts = np.zeros((PARTS, engines.shape[1]))
    if not len(queue):
        nothing = np.zeros(0)
        return OrderTimes(start_s=nothing, end_s=nothing, end_variance=nothing, late=nothing, latest_s=nothing, parts=parts)
    model = rows[MODEL]
    opens = np.ones(len(queue), dtype=np.bool_)
    np.not_equal(queue[1:], queue[:-1], out=opens[1:])
    fresh = opens.copy()
    fresh[1:] |= model[1:] != model[:-1]
    on_queues, runs = _Parts.of(opens), _Parts.of(fresh)
    first, run_first, run_last = on_queues.first, runs.first, runs.end - 1
    run_opens = opens[run_first]
    of_runs = _Parts.of(run_opens)
    of = queue[first]
    heads, engine = rows[:, first], engines[:, of]
    continues = heads[MODEL] == engine[ACTIVE]
    begin_s, begin_variance, busy_s, swap_s, clears = _opening(heads, engine, continues, weights)

    work_s, work_variance, own_variance = rows[WORK], rows[WORK_VARIANCE], rows[OWN_VARIANCE]
    lasts_s = np.add.reduceat(work_s, run_first) + rows[DRAIN, run_last]
    ends_s = np.maximum(begin_s + lasts_s[run_opens], busy_s)
    # The next model is warmed during a run; behind a continued run it is warm already.
    before_s = np.zeros_like(lasts_s)
    lasts_s[run_opens] = ends_s - np.where(continues, 0.0, begin_s)
    before_s[1:] = lasts_s[:-1]
    swaps_s = np.maximum(rows[WARM, run_first], rows[SWAP, run_first] - before_s)
    swaps_s[run_opens] = begin_s
    lasts_s[run_opens] = ends_s - begin_s
    starts_s = of_runs.sums(swaps_s + lasts_s) - lasts_s
    spread = np.zeros(len(queue))
    spread[run_last] = own_variance[run_last]
    variance = begin_variance.repeat(on_queues.sizes)
    variance += on_queues.sums(work_variance + spread) - work_variance - spread

    start_s = starts_s.repeat(runs.sizes) + runs.sums(work_s) - work_s
    late, each = _late_and_costs(rows, start_s, variance)
    # The first load of an empty engine delays no request.
    swaps_s[run_opens] = np.where(engine[ACTIVE] >= 0.0, swap_s, 0.0)
    found = np.empty((TOTAL, len(of)))
    found[[LATE, TARDINESS, COMPLETION]] = np.add.reduceat(each, first, axis=1)
    found[SWAP_S] = np.add.reduceat(swaps_s, of_runs.first)
    found[SWAPS] = of_runs.sizes - continues
    found[REDO] = np.where(clears, engine[CLEAR_COST], 0.0)
    found[MISSED] = np.where(continues, 0.0, engine[LEAVE_COST])
    parts[:TOTAL, of] = found
    if absences is not None:
        ends_s = np.zeros(engines.shape[1])
        ends_s[of] = (starts_s + lasts_s)[of_runs.end - 1]
        parts[MISSED] += absences.costs(queue[run_first], model[run_first].astype(np.int64), starts_s, ends_s)
    parts[TOTAL] = (
        weights.late * parts[LATE]
        + weights.tardiness * parts[TARDINESS]
        + weights.work * parts[SWAP_S]
        + weights.completion * parts[COMPLETION]
        + parts[REDO]
        + parts[MISSED]
    )
    return OrderTimes(
        start_s=start_s,
        end_s=start_s + work_s + np.maximum(rows[OWN], rows[DRAIN]),
        end_variance=variance + work_variance + own_variance,
        late=late,
        latest_s=start_s + rows[OWN] + np.maximum(0.0, work_s - rows[SPREAD]),
        parts=parts,
    )


def _opening(heads: Floats, engine: Floats, continues: Booleans, weights: Weights) -> tuple[Floats, Floats, Floats, Floats, Booleans]:
    """Costs the first group of each queue: its start and the variance; the end of the running batch; the seconds of swapping; whether the
    running batch is evicted, which it is where the group gains more than the eviction costs."""
    busy_s, swap_s, warm_s = engine[DRAIN_LEAD], heads[SWAP], heads[WARM]
    behind_s = busy_s + np.maximum(warm_s, swap_s - busy_s)
    cleared_s = np.maximum(warm_s, swap_s)
    behind, cleared = _late_and_costs(heads, behind_s, engine[DRAIN_LEAD_VARIANCE])[1], _late_and_costs(heads, cleared_s, 0.0)[1]
    saved = np.array((weights.late, weights.tardiness, weights.completion)) @ (behind - cleared)
    clears = ~continues & (cleared_s < behind_s) & (saved > weights.work * (cleared_s - behind_s + busy_s) + engine[CLEAR_COST])
    ready_s = np.where(clears, 0.0, busy_s)
    begin_s = np.where(continues, engine[LEAD], ready_s + np.maximum(warm_s, swap_s - ready_s))
    variance = np.where(continues, engine[LEAD_VARIANCE], np.where(clears, 0.0, engine[DRAIN_LEAD_VARIANCE]))
    return begin_s, variance, np.where(clears, 0.0, busy_s), np.where(continues, 0.0, begin_s - ready_s), clears


def _late_and_costs(groups: Floats, start_s: Floats, variance: Floats | float) -> tuple[Floats, Floats]:
    """Costs groups with these starts: the expected share of late requests; LATE, TARDINESS and COMPLETION [3, groups]."""
    reached_s, work_s = start_s + groups[OWN], groups[WORK]
    gap_s, spread = reached_s - groups[DEADLINE], variance + groups[OWN_VARIANCE]
    late, tardiness_s = _lateness(gap_s, work_s - groups[SPREAD], spread, groups[WORK_VARIANCE])
    return late, groups[REQUESTS] * np.array((late, tardiness_s, reached_s + 0.5 * work_s))


class _Parts(NamedTuple):
    """Parts of a row of values, one after the other: the first index of each, the index behind it, and its size."""

    first: Integers
    end: Integers
    sizes: Integers

    @classmethod
    def of(cls, begins: Booleans) -> _Parts:
        """The parts that start where `begins` holds, as at 0."""
        first = begins.nonzero()[0]
        end = np.empty_like(first)
        end[:-1], end[-1] = first[1:], len(begins)
        return cls(first, end, end - first)

    def sums(self, values: Floats) -> Floats:
        """Cumulative sums, of each part on its own."""
        sums = np.add.accumulate(values)
        sums -= (sums[self.first] - values[self.first]).repeat(self.sizes)
        return sums


def _lateness(gap_s: Floats, stretch_s: Floats, variance: Floats, work_variance: Floats) -> tuple[Floats, Floats]:
    """P(late) and expected tardiness of a request, averaged over the points of its group. `gap_s`: end less deadline of the first request;
    `stretch_s`: its growth to the last one; `variance`: of the first end, `work_variance`: its growth to the last one."""
    deviation = np.sqrt(np.maximum(variance + SHARES * work_variance, VARIANCE_MIN))
    z = (gap_s + SHARES * stretch_s) / deviation
    above = ndtr(z)
    excess = np.maximum(0.0, deviation * (z * above + INVERSE_SQRT_2PI * np.exp(-0.5 * z * z)))
    return np.add.reduce(above) / len(SHARES), np.add.reduce(excess) / len(SHARES)
