"""How long a run of groups of one model takes until all of it has ended, and the next model may come (QLM equation 10).

By then all its prefills are done, and all that its sequences add to the steps that they decode in; and there was the base of each step
until the longest output of the last to start has ended.
"""

from __future__ import annotations

import numpy as np

from qlm_core.normal_arrays import Floats
from qlm_core.queue_model import DECODE, PREFILL, Leads, QueueColumns, RunWaits

(SHARED, BASE, STEP, CHUNK, LONGEST) = range(5)
"""Rows of what ends a run, of one request of a group: seconds that its output adds to steps; the base of a step; a step of a full batch;
the prefill that one step takes in; and the tokens of the longest output among those of the group that are in one batch."""
ENDS = 5


def run_lengths(columns: QueueColumns, leads: Leads, waits: RunWaits, ends: Floats, end_variance: Floats) -> tuple[Floats, Floats]:
    """Means and variances [runs]. `ends` [ENDS, groups]; `end_variance` [groups]: of the end of each group. What runs already and is of the
    run's model ends with it."""
    first = waits.queue_run
    total = np.add.reduceat(columns.count * (columns.each[PREFILL] + ends[SHARED]), waits.run_first)
    decode_s = columns.each[DECODE].take(columns.first)
    share = np.divide(ends[SHARED].take(columns.first), decode_s, out=np.zeros_like(decode_s), where=decode_s > 0.0)
    total[first] += (leads.left[PREFILL] + leads.left[DECODE] * share) * waits.goes_on
    prefill_s = waits.ahead[PREFILL] + waits.others * columns.each[PREFILL]
    steps = np.maximum(prefill_s / ends[CHUNK], (waits.wait_s[1] - prefill_s) / ends[STEP])
    length_s = total + np.maximum.reduceat(ends[BASE] * (steps + ends[LONGEST]), waits.run_first)
    length_s[first] = np.maximum(length_s[first], leads.drain_s * waits.goes_on)
    return length_s, end_variance.take(waits.run_last)
