"""Waiting and completion of single requests, any number at once: O(1) each from the prefix sums of their groups (QLM equations 1 to 4).

A `RequestTable` holds what the requests of each group need, a column for each group; queues can be taken out and put in. A prediction
is a hundred or so operations on whole arrays, done in blocks that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from qlm_core.calibration import FIGURES, CalibrationProfile
from qlm_core.calibration import calibrated as calibrated_by
from qlm_core.distribution import normal_quantile
from qlm_core.instance import PREFILL_CHUNK_TOKENS
from qlm_core.normal_arrays import Floats, beyond
from qlm_core.planned_waits import WaitCurve
from qlm_core.queue_columns import COUNT, DEADLINE, FIRST_TOKEN, LAST_DEADLINE, PREFILL_SQUARE, PREFILL_TOKEN, PROMPT
from qlm_core.queue_model import DECODE, PREFILL, VARIANCE, Integers, seat_waits
from qlm_core.queue_times import QueueTimes

BLOCK = 8_192
"""Requests that are worked out together: their arrays fit in the cache."""

LATENESS_POINTS = 6
"""Requests of a group that lateness is worked out for; the others lie between them."""
_SHARES: Floats = (np.arange(LATENESS_POINTS) + 0.5) / LATENESS_POINTS

(START, START_VARIANCE, PREFILL_AHEAD, PREFILL_EACH, DECODE_AHEAD, DECODE_EACH, VARIANCE_AHEAD, VARIANCE_EACH, IN_FLIGHT, IN_FLIGHT_MORE,
 WINDOW, SEATS_AHEAD, SEAT_EACH, SEAT_LEAST, CHUNK, CHUNK_EACH, TOKEN, TOKEN_EACH, PER_TOKEN, PER_SQUARE, OUTPUT, OUTPUT_VARIANCE,
 MEAN_PROMPT) = range(23)  # fmt: skip
WAIT_CALIBRATION = 23
COMPLETION_CALIBRATION = WAIT_CALIBRATION + FIGURES
TABLE_ROWS = COMPLETION_CALIBRATION + FIGURES


@dataclass(frozen=True, slots=True, eq=False)
class RequestTimes:
    """Seconds from now, arrays [requests]: of the start (W) and the end (C = W + P + D); `prefill_s`: P. Calibrated where the snapshot has
    rows for it."""

    wait_s: Floats
    wait_variance: Floats
    prefill_s: Floats
    completion_s: Floats
    completion_variance: Floats

    def wait_quantile_s(self, probability: float) -> Floats:
        """The wait that is not exceeded with this probability; a wait is never negative."""
        return _quantile(self.wait_s, self.wait_variance, probability)

    def completion_quantile_s(self, probability: float) -> Floats:
        """As `wait_quantile_s`, of the completion."""
        return _quantile(self.completion_s, self.completion_variance, probability)


def _quantile(mean: Floats, variance: Floats, probability: float) -> Floats:
    if not 0.0 < probability < 1.0:
        raise ValueError(f"a probability of a quantile is in (0, 1), got {probability}")
    found = np.sqrt(variance)
    found *= normal_quantile(probability)
    found += mean
    return np.maximum(found, 0.0, out=found)


@dataclass(frozen=True, slots=True, eq=False)
class Calibrations:
    """`rows`: pairs for waits and for completions; `of` [groups]: the number of the pair of each group."""

    rows: Sequence[tuple[CalibrationProfile, CalibrationProfile]]
    of: Integers


@dataclass(frozen=True, slots=True, eq=False)
class RequestTable:
    """`columns` [groups, TABLE_ROWS], in the order of the groups of the queues. `calibrated`: whether any group has a calibration row."""

    columns: Floats
    calibrated: bool

    @classmethod
    def of(cls, times: QueueTimes, calibrations: Calibrations | None = None) -> RequestTable:
        """`calibrations`: None: as the formulas have them."""
        waits, columns, served, rows = times.waits, times.columns, times.groups.service, times.groups.rows
        ahead, each, more = waits.ahead, columns.each, waits.others
        per_request = 1.0 / np.maximum(more, 1.0)
        table = np.zeros((TABLE_ROWS, columns.count.size))
        table[START], table[START_VARIANCE] = times.start_s, times.start_variance
        table[PREFILL_AHEAD], table[PREFILL_EACH] = ahead[PREFILL], each[PREFILL]
        table[DECODE_AHEAD], table[DECODE_EACH] = ahead[DECODE], each[DECODE]
        table[VARIANCE_AHEAD], table[VARIANCE_EACH] = ahead[VARIANCE], each[VARIANCE]
        table[IN_FLIGHT], table[IN_FLIGHT_MORE] = waits.in_flight_s[0], waits.in_flight_s[1] - waits.in_flight_s[0]
        table[WINDOW] = 1.0 / np.maximum(np.minimum(served.batch, more), 1.0)
        table[SEATS_AHEAD], table[SEAT_EACH] = waits.seats_ahead, waits.seat_each
        table[SEAT_LEAST] = np.maximum(waits.wait_s[0] - ahead[PREFILL], 0.0)
        table[CHUNK], table[CHUNK_EACH] = times.chunk_s[0], (times.chunk_s[1] - times.chunk_s[0]) * per_request
        table[TOKEN], table[TOKEN_EACH] = times.token_s[0], (times.token_s[1] - times.token_s[0]) * per_request
        table[PER_TOKEN], table[PER_SQUARE] = rows[PREFILL_TOKEN], rows[PREFILL_SQUARE]
        table[OUTPUT], table[OUTPUT_VARIANCE] = served.output, served.output_variance
        table[MEAN_PROMPT] = rows[PROMPT]
        for at, which in ((WAIT_CALIBRATION, 0), (COMPLETION_CALIBRATION, 1)):
            if calibrations is not None:
                table[at : at + FIGURES] = np.array([both[which].figures for both in calibrations.rows]).T[:, calibrations.of]
        return cls(columns=np.ascontiguousarray(table.T), calibrated=calibrations is not None)

    def times(
        self,
        group: ArrayLike,
        position: ArrayLike,
        *,
        prompt_tokens: ArrayLike | None = None,
        output_tokens: ArrayLike | None = None,
        output_variance: ArrayLike | None = None,
        calibrated: bool = True,
    ) -> RequestTimes:
        """Requests by their group's number and how many of the group are before each (0 for its first; beyond the last counts as behind
        the last). `prompt_tokens`, `output_tokens`, `output_variance` [requests]: of the request itself, None: as its group has them in the
        mean. Costs O(requests). Raises ValueError for a negative position, IndexError for a group that is not there."""
        groups = np.ascontiguousarray(group, dtype=np.intp)
        places = np.ascontiguousarray(position, dtype=np.float64)
        if places.size and not places.min() >= 0.0:
            raise ValueError("a position is a number >= 0")
        prompts, outputs, variances = _given(prompt_tokens), _given(output_tokens), _given(output_variance)
        found = np.empty((5, groups.size))
        calibrated = calibrated and self.calibrated
        for begin in range(0, groups.size, BLOCK):
            block = slice(begin, begin + BLOCK)
            own = _part(prompts, block), _part(outputs, block), _part(variances, block)
            _fill(self.columns[groups[block]].T, places[block], own, found[:, block], calibrated)
        return RequestTimes(*found)

    def curve(self, group: ArrayLike, position: ArrayLike, ahead: Iterable[float]) -> WaitCurve:
        """The waits of requests at places of groups as `times` has them, before calibration, by the requests `ahead`, which do not fall."""
        groups, places = np.asarray(group, dtype=np.intp), np.asarray(position, dtype=np.float64)
        times, rows = self.times(groups, places, calibrated=False), self.columns[groups].T
        columns = (
            times.wait_s,
            times.wait_variance,
            rows[CHUNK] + places * rows[CHUNK_EACH],
            rows[TOKEN] + places * rows[TOKEN_EACH],
        )
        return WaitCurve(tuple(ahead), *(tuple(column.tolist()) for column in columns))

    def times_along(self, groups: Integers, places: Floats) -> RequestTimes:
        """Requests of some groups: `places` [points, groups] of them in each, and the answers in that shape."""
        found = np.empty((5, *places.shape))
        _fill(self.columns[groups].T, places, (None, None, None), found, self.calibrated)
        return RequestTimes(*found)


def lateness(table: RequestTable, rows: Floats, now_s: float) -> tuple[Floats, Floats]:
    """Expected late requests, and expected sum of the seconds that requests end after their deadlines, of each group [groups]: each request
    with its own place and its own deadline, under first come first served (not the maximum against one SLO). `rows`: of the same groups
    (`QueueGroups.rows`); `now_s`: the queue's clock, as deadlines have it. A deadline that is now or was before is missed."""
    late, tardiness = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    bound = np.flatnonzero((rows[DEADLINE] < np.inf) & (rows[COUNT] > 0.0))
    if not len(bound):
        return late, tardiness
    count, first, last = rows[COUNT, bound], rows[DEADLINE, bound], rows[LAST_DEADLINE, bound]
    place = np.clip(_SHARES[:, None] * count - 0.5, 0.0, count - 1.0)
    times = table.times_along(bound, place)
    first_token = rows[FIRST_TOKEN, bound] > 0.0
    end = np.where(first_token, times.wait_s + times.prefill_s, times.completion_s)
    variance = np.where(first_token, times.wait_variance, times.completion_variance)
    left_s = first + place / np.maximum(count - 1.0, 1.0) * (last - first) - now_s
    missed, excess = beyond(end, variance, left_s)
    late[bound] = count * np.where(left_s <= 0.0, 1.0, missed).mean(axis=0)
    tardiness[bound] = count * excess.mean(axis=0)
    return late, tardiness


def _given(values: ArrayLike | None) -> Floats | None:
    return None if values is None else np.ascontiguousarray(values, dtype=np.float64)


def _part(values: Floats | None, block: slice) -> Floats | None:
    return None if values is None else values[block]


def _fill(row: Floats, place: Floats, own: tuple[Floats | None, Floats | None, Floats | None], out: Floats, calibrated: bool) -> None:
    """One block: `row` [TABLE_ROWS, requests] of their groups, `place` [..., requests] in these, `own`: prompts, outputs and their variance
    where they are given; `out` [5, ..., requests]."""
    prompt, output, output_variance = own
    window = np.minimum(place * row[WINDOW], 1.0)
    work = row[DECODE_AHEAD] + place * row[DECODE_EACH] - row[IN_FLIGHT] - window * row[IN_FLIGHT_MORE]
    variance = row[VARIANCE_AHEAD] + place * row[VARIANCE_EACH]
    seat, spread = seat_waits(work, variance, row[SEATS_AHEAD] + (place + 1.0) * row[SEAT_EACH])
    wait = row[START] + row[PREFILL_AHEAD] + place * row[PREFILL_EACH] + np.maximum(seat, row[SEAT_LEAST])
    spread += row[START_VARIANCE]
    tokens = row[MEAN_PROMPT] if prompt is None else prompt
    work = row[PREFILL_EACH] if prompt is None else prompt * (row[PER_TOKEN] + prompt * row[PER_SQUARE])
    prefill = work + np.maximum(tokens / PREFILL_CHUNK_TOKENS, 1.0) * (row[CHUNK] + place * row[CHUNK_EACH])
    token = row[TOKEN] + place * row[TOKEN_EACH]
    made = row[OUTPUT] if output is None else output
    varies = row[OUTPUT_VARIANCE] if output_variance is None else output_variance
    completion = wait + prefill + made * token
    completion_spread = spread + varies * token * token
    if calibrated:
        wait, spread = calibrated_by(row[WAIT_CALIBRATION:], wait, spread)
        completion, completion_spread = calibrated_by(row[COMPLETION_CALIBRATION:], completion, completion_spread)
    out[0], out[1], out[2], out[3], out[4] = wait, spread, prefill, completion, completion_spread
