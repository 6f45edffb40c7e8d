"""The model of a virtual queue: when each group would be served (QLM section 6; equation 10 for the swaps). There is one, and this is it.

Groups of one model in a row are a *run*: their requests share the batch. A request of a run waits

- until the run starts;
- for the prefills ahead of it in the run, which are served one after the other and are known;
- for a seat: the decode work ahead of it, less what is still in flight when it starts (a full batch holds that much whenever one of its
  sequences ends). Which requests these are follows from the seats: those of the last full batch before it. Where the batch has a free seat
  it waits for none. Decode work is unknown: the wait for it is the positive part of a normal.

A run starts when all of the run before it has ended and the new weights are in; what is on disk is brought to host memory meanwhile.

All is prefix sums, so a queue costs O(groups), many queues cost one pass, and a request in a group O(1) (`request_times`).
The planner tries thousands of orders a second with it, so what goes the same way goes as one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qlm_core.statistics.normal_arrays import Floats, floored

Integers = NDArray[np.int64]

(REQUESTS, PREFILL, DECODE, VARIANCE, SEATS, LEFT) = range(6)
"""Rows of what adds up along a queue: requests; seconds of prefills; seconds of decode work and their variance; seats, of a full batch; and
seconds of decode work that these hold in a full batch whenever a sequence of it ends."""
SUMS = 6

PERSISTENCE = 2.0
"""Work after which a batch is another, over what it held: the mean square of what its requests have left over the squared mean, which is 2
where outputs are memoryless."""
FULL_SHARE = 0.9
"""Share of a batch from which on it counts as full."""
SEATS_SLACK = 1e-9
"""Tolerance of seats: sums of shares are not exact."""


@dataclass(frozen=True, slots=True, eq=False)
class QueueColumns:
    """The groups of one or several virtual queues in the order of service. `first` [queues]: the first group of each, and every queue has
    one. `each` [SUMS, groups]: of one request of the group. `count`: its requests. `model`: a number for each model. `swap_s`, `warm_s`:
    to make the model the active one, from where its weights are now and from host memory."""

    first: Integers
    each: Floats
    count: Floats
    model: Floats
    swap_s: Floats
    warm_s: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Leads:
    """Present state of each queue's engine. `model` [queues]: the active one. `left` [SUMS, queues]: what is left of all that runs.
    `held_s`: decode work of its batch, which is all of that unless more was pulled than decode at a time.
    `drain_s`, `drain_variance`: until all of it has ended or was evicted, where another model comes next.
    `loading_s`: until the active model is loaded, before which nothing starts; None: it is everywhere."""

    model: Floats
    left: Floats
    held_s: Floats
    drain_s: Floats
    drain_variance: Floats
    loading_s: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RunWaits:
    """Waits since the start of the own run, and where the runs are. [runs]: `run_first`, `run_last`: their groups. [queues]: `queue_run`:
    the first run of each; `goes_on`: whether the active model serves it. [groups]: `run`; `ahead` [SUMS, groups]: in the run ahead of the
    first request, with what runs; `behind`: requests behind the last one. `others` [groups]: requests of a group beside one. As pairs of
    the first and the last request of each group, [2, groups]: `in_flight_s`: decode work ahead that it need not wait for; `wait_s`,
    `wait_variance`. `seats_ahead`, `seat_each` [groups]: the first request finds so many batches full, and each of the group takes so
    much of one."""

    run_first: Integers
    run_last: Integers
    queue_run: Integers
    goes_on: NDArray[np.bool_]
    run: Integers
    ahead: Floats
    behind: Floats
    others: Floats
    in_flight_s: Floats
    wait_s: Floats
    wait_variance: Floats
    seats_ahead: Floats
    seat_each: Floats


def run_waits(columns: QueueColumns, leads: Leads) -> RunWaits:
    """The waits inside the runs. Needs at least one group."""
    count, model, each = columns.count, columns.model, columns.each
    fresh = np.empty(count.size, dtype=np.bool_)
    np.not_equal(model[1:], model[:-1], out=fresh[1:])
    fresh[columns.first] = True
    run_first = fresh.nonzero()[0]
    run = np.add.accumulate(fresh, dtype=np.int64) - 1
    queue_run = run.take(columns.first)
    goes_on = model.take(columns.first) == leads.model
    lead = np.zeros((SUMS, run_first.size))
    lead[:, queue_run] = leads.left * goes_on
    held_s = np.zeros(run_first.size)
    held_s[queue_run] = leads.held_s * goes_on

    whole = count * each
    ahead = np.add.accumulate(whole, axis=1)
    ahead -= whole
    ahead += (lead - ahead.take(run_first, axis=1)).take(run, axis=1)
    run_last = np.empty_like(run_first)
    run_last[:-1], run_last[-1] = run_first[1:], count.size
    run_last -= 1
    through = ahead[REQUESTS] + count
    others = np.maximum(count - 1.0, 0.0)
    in_flight = _in_flight(whole, each, others, lead, run_first, run)

    places = np.empty((2, count.size))
    places[0], places[1] = 0.0, others
    work = ahead[DECODE] + places * each[DECODE]
    held = held_s.take(run) * (lead[SEATS].take(run) >= FULL_SHARE)
    stays = persistence(work, held)
    in_flight = stays * held + (1.0 - stays) * in_flight
    seats_ahead, seat_each = ahead[SEATS], each[SEATS]
    work -= in_flight
    variance = ahead[VARIANCE] + places * each[VARIANCE]
    seat, spread = seat_waits(work, variance, seats_ahead + (places + 1.0) * seat_each)
    seat, spread = _in_order(seat, spread, run)
    return RunWaits(
        run_first=run_first,
        run_last=run_last,
        queue_run=queue_run,
        goes_on=goes_on,
        run=run,
        ahead=ahead,
        behind=through.take(run_last.take(run)) - through,
        others=others,
        in_flight_s=in_flight,
        wait_s=ahead[PREFILL] + places * each[PREFILL] + seat,
        wait_variance=spread,
        seats_ahead=seats_ahead,
        seat_each=seat_each,
    )


def persistence(work_s: Floats, held_s: Floats) -> Floats:
    """How much the batch that a request starts in is still like the one that runs now, which holds `held_s` of decode work, when so much
    work (that included) is ahead of it: 1 the same, 0 renewed. Short outputs leave soon, but what is left is with the long ones: it fades
    as the engine has done PERSISTENCE times what the batch held. 0 where nothing runs, or the batch was not full."""
    fades = PERSISTENCE * np.maximum(held_s, 1e-12)
    found: Floats = np.exp(-np.maximum(work_s - held_s, 0.0) / fades) * (held_s > 0.0)
    return found


def seat_waits(work_s: Floats, variance: Floats, taken: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of the wait for a seat, behind `work_s` of decode work beyond what is in flight; `taken`: seats of a batch taken
    with the request's own."""
    full = taken > 1.0 + SEATS_SLACK
    return floored(work_s * full, variance * full)


def run_starts(
    columns: QueueColumns, leads: Leads, waits: RunWaits, length_s: Floats, length_variance: Floats
) -> tuple[Floats, Floats, Floats]:
    """When the runs start, from now: means and variances [runs]; and the seconds of their swaps, 0 where the active model goes on.
    `length_s`, `length_variance`: of each run, from its start until all of it has ended."""
    swap, warm = columns.swap_s.take(waits.run_first), columns.warm_s.take(waits.run_first)
    first, stops = waits.queue_run, ~waits.goes_on
    ready = np.zeros((2, swap.size))
    ready[0, first], ready[1, first] = leads.drain_s * stops, leads.drain_variance * stops
    if leads.loading_s is not None:
        ready[0, first] += leads.loading_s
    before = np.empty_like(swap)
    before[1:] = length_s[:-1]
    before[first] = ready[0, first]
    swap = np.maximum(warm, swap - before)
    swap[first] *= stops
    taken = np.array((length_s, length_variance))
    ready[0] += swap
    starts = np.add.accumulate(ready + taken, axis=1) - taken
    if first.size > 1:
        base = (starts - ready)[:, first]
        starts -= np.repeat(base, np.diff(np.append(first, swap.size)), axis=1)
    return starts[0], np.maximum(starts[1], 0.0), swap


def _in_flight(whole: Floats, each: Floats, others: Floats, lead: Floats, run_first: Integers, run: Integers) -> Floats:
    """Decode work in flight when the first and the last request of each group start: what the last full batch of seats before it holds.
    Before a run's own requests that is taken to be as theirs, or as of those that run."""
    groups = run.size
    place = np.arange(2, groups + 2) + run
    knots = np.zeros((2, groups + run_first.size + 1))
    knots[:, place] = whole[SEATS:]
    # In front of each run: what runs, and a batch like that, or like its first group.
    like = np.where(lead[SEATS] > 0.0, lead[SEATS:], each[SEATS:].take(run_first, axis=1))
    knots[:, place.take(run_first) - 1] = like * ((1.0 + lead[SEATS]) / like[0])
    seats, work = np.add.accumulate(knots, axis=1)
    at, more = seats.take(place - 1) - 1.0, others * each[SEATS:]
    found = np.empty((2, groups))
    found[0], found[1] = at, at + more[0]
    in_flight: Floats = work.take(place - 1) - np.interp(found, seats, work)
    in_flight[1] += more[1]
    return in_flight


def _in_order(seat: Floats, variance: Floats, run: Integers) -> tuple[Floats, Floats]:
    """Makes starts of a run ascend: each waits at least as long as the longest before it."""
    first, last = seat
    if (last >= first).all() and (first[1:] >= last[:-1] * (run[1:] == run[:-1])).all():
        return seat, variance
    raw = seat.T.ravel()
    # Every run begins above all before it.
    lifted = raw + np.repeat(run, 2) * (float(raw.max()) + 1.0)
    longest = np.maximum.accumulate(np.where(lifted >= np.maximum.accumulate(lifted), np.arange(raw.size), 0))
    return raw[longest].reshape(-1, 2).T, variance.T.ravel()[longest].reshape(-1, 2).T
