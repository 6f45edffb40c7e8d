"""How many requests of each group would be late, and by how much: each request with its own place and its own deadline, under first come
first served (the design's group lateness; not the maximum against one SLO)."""

from __future__ import annotations

import numpy as np

from qlm_core.normal_arrays import Floats, beyond
from qlm_core.queue_columns import COUNT, DEADLINE, FIRST_TOKEN, LAST_DEADLINE
from qlm_core.request_times import RequestTable

POINTS = 6
"""Requests of a group that lateness is worked out for; the others lie between them."""

_SHARES: Floats = (np.arange(POINTS) + 0.5) / POINTS


def lateness(table: RequestTable, rows: Floats, now_s: float) -> tuple[Floats, Floats]:
    """Expected late requests, and expected sum of the seconds that requests end after their deadlines, of each group [groups]. `rows`: of
    the same groups (`QueueGroups.rows`); `now_s`: the queue's clock, as deadlines have it. A deadline that is now or was before is
    missed."""
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
