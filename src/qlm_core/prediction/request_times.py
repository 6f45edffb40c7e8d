"""Waiting and completion of single requests, any number at once: O(1) each from the prefix sums of their groups (QLM equations 1 to 4).

A `RequestTable` holds what the requests of each group need, a column for each group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from qlm_core.prediction.planned_waits import WaitCurve
from qlm_core.prediction.queue_model import DECODE, PREFILL, VARIANCE, seat_waits
from qlm_core.prediction.queue_times import QueueTimes
from qlm_core.statistics.normal_arrays import Floats
from qlm_core.vocabulary.instance import PREFILL_CHUNK_TOKENS

(START, START_VARIANCE, PREFILL_AHEAD, PREFILL_EACH, DECODE_AHEAD, DECODE_EACH, VARIANCE_AHEAD, VARIANCE_EACH, IN_FLIGHT, IN_FLIGHT_MORE,
 WINDOW, SEATS_AHEAD, SEAT_EACH, SEAT_LEAST, CHUNK, CHUNK_EACH, TOKEN, TOKEN_EACH, OUTPUT, OUTPUT_VARIANCE,
 PREFILL_TOKENS) = range(21)  # fmt: skip
TABLE_ROWS = 21


@dataclass(frozen=True, slots=True, eq=False)
class RequestTimes:
    """Seconds from now, arrays [requests]: of the start (W) and the end (C = W + P + D), before calibration; `prefill_s`: P."""

    wait_s: Floats
    wait_variance: Floats
    prefill_s: Floats
    completion_s: Floats
    completion_variance: Floats


@dataclass(frozen=True, slots=True, eq=False)
class RequestTable:
    """`columns` [groups, TABLE_ROWS], in the order of the groups of the queues."""

    columns: Floats

    @classmethod
    def of(cls, times: QueueTimes) -> RequestTable:
        waits, columns, served = times.waits, times.columns, times.groups.service
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
        table[OUTPUT], table[OUTPUT_VARIANCE] = served.output, served.output_variance
        table[PREFILL_TOKENS] = served.prefill_tokens
        return cls(columns=np.ascontiguousarray(table.T))

    def times(self, group: ArrayLike, position: ArrayLike) -> RequestTimes:
        """Requests by their group's number and how many of the group are before each (0 for its first; beyond the last counts as behind
        the last), with the mean prompt and output of their group. Costs O(requests). Raises ValueError for a negative
        position, IndexError for a group that is not there."""
        row, place = self.columns[np.asarray(group, dtype=np.intp)].T, np.asarray(position, dtype=np.float64)
        if place.size and not place.min() >= 0.0:
            raise ValueError("a position is a number >= 0")
        window = np.minimum(place * row[WINDOW], 1.0)
        work = row[DECODE_AHEAD] + place * row[DECODE_EACH] - row[IN_FLIGHT] - window * row[IN_FLIGHT_MORE]
        variance = row[VARIANCE_AHEAD] + place * row[VARIANCE_EACH]
        seat, spread = seat_waits(work, variance, row[SEATS_AHEAD] + (place + 1.0) * row[SEAT_EACH])
        wait = row[START] + row[PREFILL_AHEAD] + place * row[PREFILL_EACH] + np.maximum(seat, row[SEAT_LEAST])
        spread += row[START_VARIANCE]
        chunks = np.maximum(row[PREFILL_TOKENS] / PREFILL_CHUNK_TOKENS, 1.0)
        prefill = row[PREFILL_EACH] + chunks * (row[CHUNK] + place * row[CHUNK_EACH])
        token = row[TOKEN] + place * row[TOKEN_EACH]
        return RequestTimes(wait, spread, prefill, wait + prefill + row[OUTPUT] * token, spread + row[OUTPUT_VARIANCE] * token * token)

    def curve(self, group: ArrayLike, position: ArrayLike, ahead: Iterable[float]) -> WaitCurve:
        """The waits of requests at places of groups as `times` has them, by the requests `ahead`, which do not fall."""
        groups, places = np.asarray(group, dtype=np.intp), np.asarray(position, dtype=np.float64)
        times, rows = self.times(groups, places), self.columns[groups].T
        columns = (
            times.wait_s,
            times.wait_variance,
            rows[CHUNK] + places * rows[CHUNK_EACH],
            rows[TOKEN] + places * rows[TOKEN_EACH],
        )
        return WaitCurve(tuple(ahead), *(tuple(column.tolist()) for column in columns))
