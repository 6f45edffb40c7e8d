"""How the batch of an engine goes on from now: what runs makes way, what waits takes its place.

`batch_mix` knows what a batch holds in the mean. What it holds now may be another: thirty requests that have made thousands of tokens hold
most of the KV, so that few others find room, and make each step longer. They stay for as long as such requests stay. So along the decode
steps from now, at KNOTS:

- of the requests that run, those that are still there, given what each has made, with the tokens that they hold by then;
- beside them as many of those that wait as find a seat and KV. Of these, the ones that started are as old as there was time for: what one
  holds and has left in the mean grows with that (a renewal process that begins now).

A step takes as long as the sequences and their tokens then make it; and so much work of those that wait has started by then. A course is
these two beside each other, in seconds: the wait for a seat behind so much work. Prefills are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from qlm_core.instance import PREFILL_CHUNK_TOKENS
from qlm_core.length_curve import LengthCurve, survivals
from qlm_core.normal_arrays import Floats
from qlm_core.prediction_service import EngineColumns, Integers

STEPS: Floats = np.array([0.0, *(2.0**power for power in range(4, 16))])
KNOTS = len(STEPS)
COURSE_ROWS = 2 * KNOTS
"""Rows of the course of a queue: work that has started, and the wait, in seconds at each knot; all zero where there is none."""

RESERVED_GROWTH = 0.5
"""A run that outgrew what its agent reserved for it is taken to make so much of its output again."""
RESERVED = RESERVED_GROWTH / math.log1p(RESERVED_GROWTH)
"""KV that is reserved for such a run over what it has made, in the mean along its way."""

(ALIVE, LEFT_LATER, BY_THEN, SQUARE_BY_THEN) = range(4)
"""Rows of `ages`: P(O > u), E[(O - u)+], E[min(O, u)] and E[min(O, u)^2] / 2: of one request, what is there at the age u, what is left, and
the sums over all ages up to u of what is there and of what that has made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runners:
    """Requests that run, one place each, ordered by queue. `queue`, `curve`: numbers; `limit`: most tokens that one may make."""

    queue: Integers
    curve: Integers
    prompt: Floats
    produced: Floats
    limit: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Classes of requests that wait for a seat of the batch that runs: `count` of each with so many prompt tokens and output tokens in the
    mean, `token_s` seconds of work for each of these; `queue`, `curve`: numbers."""

    queue: Integers
    curve: Integers
    count: Floats
    prompt: Floats
    output: Floats
    token_s: Floats


@lru_cache(maxsize=1024)
def ages(curve: LengthCurve) -> Floats:
    """Of one request, [4, KNOTS]."""
    alive, tokens, squares = curve.beyond(STEPS)
    later = tokens - alive * STEPS
    mean = float(curve.output_tokens.mean)
    square = curve.output_tokens.variance + mean * mean
    return np.array((alive, later, mean - later, (square - (squares - alive * STEPS**2)) / 2.0))


def courses(
    engine: EngineColumns, of: Integers, usual: Floats, curves: Sequence[LengthCurve], samples: Floats, runners: Runners, waiting: Waiting
) -> Floats:
    """[COURSE_ROWS, queues]. `of` [queues]: the engine of the active model of each; `usual`: the mean output of that model's requests,
    which agents reserve; `samples`: requests that each curve rests on. A queue has a course where its runners are told and something waits
    for a seat beside them."""
    queues = len(of)
    found = np.zeros((COURSE_ROWS, queues))
    if not (runners.queue.size and waiting.queue.size):
        return found
    running = _by_queue(queues, runners.queue, _of_runners(curves, samples, runners, usual))
    table = np.array([ages(curve) for curve in curves])
    mean = table[:, BY_THEN, -1] + table[:, LEFT_LATER, -1]
    each = table[waiting.curve] * (waiting.count * waiting.output / mean[waiting.curve])[:, None, None]
    requests, tokens, prompts, work_s = _by_queue(
        queues,
        waiting.queue,
        waiting.count * np.array((np.ones_like(waiting.output), waiting.output, waiting.prompt, waiting.output * waiting.token_s)),
    )
    told = np.flatnonzero((running[0, :, 0] > 0.0) & (requests > 0.0))
    if not told.size:
        return found
    prompt, reserved = waiting.prompt[:, None], usual[waiting.queue][:, None]
    there: Floats = each[:, BY_THEN]
    # What is reserved for one until it outgrows that, and then.
    usually = np.minimum(STEPS, reserved)
    by_usual = _along(STEPS, there, usually), _along(STEPS, each[:, SQUARE_BY_THEN], usually)
    kept = reserved * by_usual[0] + RESERVED * (each[:, SQUARE_BY_THEN] - by_usual[1])
    later = _integrals(each[:, LEFT_LATER], STEPS)
    sums = _by_queue(queues, waiting.queue, np.array((there, prompt * there + kept, prompt * there + each[:, SQUARE_BY_THEN], later)))
    means = np.array((tokens[told] / requests[told], prompts[told] / requests[told], work_s[told] / tokens[told]))
    found[:, told] = _course(running[:, told], sums[:, told], means, engine, of[told])
    return found


def _course(running: Floats, sums: Floats, means: Floats, engine: EngineColumns, of: Integers) -> Floats:
    count, held, context = running
    there, reserved, holds, later = sums
    output, prompt, token_s = (row[:, None] for row in means)
    known = np.maximum(there[:, 1:], 1e-12)

    def each(total: Floats, first: Floats) -> Floats:
        """Of one of those that started, at each knot; `first`: of one that starts now."""
        return np.concatenate((first, total[:, 1:] / known), axis=1)

    reserved = each(reserved, reserved[:, 1:2] / known[:, :1])
    holds, left = each(holds, prompt), each(later, output)
    seats = np.minimum(engine.batch_max[of][:, None], PREFILL_CHUNK_TOKENS * output / np.maximum(1.0, prompt))
    room = np.maximum(engine.kv_tokens[of][:, None] - held, 0.0) / reserved
    batch = np.maximum(np.minimum(np.maximum(seats, count), count + room), 1.0)
    others = batch - count
    base, sequence, token = (row[of][:, None] for row in (engine.step_base_s, engine.sequence_s, engine.context_token_s))
    step_s = base + sequence * batch + token * (context + others * holds)
    wait_s = _integrals(step_s, STEPS)
    started = np.maximum.accumulate(_integrals(others, STEPS) + others * left, axis=1)
    started += np.arange(KNOTS) * 1e-9  # where nothing starts, later is still later
    # In front of who starts at once there is slack.
    wait_s[:, 0] -= (started[:, :1] * step_s[:, :1] / batch[:, :1])[:, 0]
    return np.concatenate((started * token_s, wait_s), axis=1).T


def _of_runners(curves: Sequence[LengthCurve], samples: Floats, runners: Runners, usual: Floats) -> Floats:
    """[3, runners, KNOTS]: of each, whether it is still there, KV reserved for it, and tokens that it holds then."""
    made = runners.produced[:, None] + STEPS
    alive = survivals(curves, samples, runners.curve, runners.produced, STEPS) * (made < runners.limit[:, None])
    reserved = usual[runners.queue][:, None]
    prompt = runners.prompt[:, None]
    return np.array((alive, alive * (prompt + np.where(made > reserved, RESERVED * made, reserved)), alive * (prompt + made)))


def _by_queue(queues: int, queue: Integers, values: Floats) -> Floats:
    """Sums of [rows, places, ...] over the places of each queue, which are in order."""
    found = np.zeros((values.shape[0], queues, *values.shape[2:]))
    if queue.size:
        first = np.flatnonzero(np.diff(queue, prepend=-1))
        found[:, queue[first]] = np.add.reduceat(values, first, axis=1)
    return found


def _integrals(values: Floats, at: Floats) -> Floats:
    """From the first knot to each, by trapezoids."""
    found = np.zeros_like(values)
    np.cumsum((values[:, 1:] + values[:, :-1]) * (0.5 * np.diff(at)), axis=1, out=found[:, 1:])
    return found


def _along(at: Floats, values: Floats, wanted: Floats) -> Floats:
    """Rows of values at knots, between these: `wanted` [rows, ...], each within them."""
    low = np.clip(np.searchsorted(at, wanted, side="right") - 1, 0, len(at) - 2)
    share = (wanted - at[low]) / (at[low + 1] - at[low])
    below, above = np.take_along_axis(values, low, axis=1), np.take_along_axis(values, low + 1, axis=1)
    found: Floats = below + share * (above - below)
    return found


def seat_waits_by(course: Floats, of: Integers, work_s: Floats) -> Floats:
    """The wait behind so much work of those that wait: `of` [places]: the queue of each, `course` [COURSE_ROWS, queues], `work_s`
    [..., places]. Behind the last knot it goes on as before it."""
    started, wait_s = course[:KNOTS].T, course[KNOTS:].T
    last = started[:, -1]
    # One row of knots for all: each queue begins where the one before it ends.
    begins = np.concatenate(([0.0], np.cumsum(last + 1.0)[:-1]))
    within = np.minimum(work_s, last[of]) + begins[of]
    found: Floats = np.interp(within, (started + begins[:, None]).ravel(), wait_s.ravel())
    pace = (wait_s[:, -1] - wait_s[:, -2]) / np.maximum(last - started[:, -2], 1e-9)
    return found + np.maximum(work_s - last[of], 0.0) * pace[of]
