"""How long a run of groups of one model takes until all of it has ended, and the next model may load (QLM equation 10).

By then all its prefills are done, and all that its sequences add to the steps that they decode in; and there was the base of each step
until the last output has ended. Each group ends with its longest output, which is a Gumbel variable: the last of several groups ends later
than the latest of their means.
"""

from __future__ import annotations

import numpy as np

from qlm_core.prediction.queue_model import DECODE, PREFILL, Leads, QueueColumns, RunWaits
from qlm_core.statistics.normal_arrays import Floats

(SHARED, BASE, STEP, CHUNK, LONGEST, SCALE) = range(6)
"""Rows of what ends a run, of one request of a group: seconds that its output adds to steps; the base of a step; a step of a full batch;
the prefill that one step takes in; and mean and Gumbel scale of the longest output among those of the group that are in one batch, in
tokens."""
ENDS = 6
NEWTON_STEPS = 2
"""From below, as the function is convex; of groups with the same scale the first is exact."""


def run_lengths(columns: QueueColumns, leads: Leads, waits: RunWaits, ends: Floats, end_variance: Floats) -> tuple[Floats, Floats]:
    """Means and variances [runs]. `ends` [ENDS, groups]; `end_variance` [groups]: of the end of each group. Present runs of the
    run's model ends with it."""
    first = waits.queue_run
    total = np.add.reduceat(columns.count * (columns.each[PREFILL] + ends[SHARED]), waits.run_first)
    decode_s = columns.each[DECODE].take(columns.first)
    share = np.divide(ends[SHARED].take(columns.first), decode_s, out=np.zeros_like(decode_s), where=decode_s > 0.0)
    total[first] += (leads.left[PREFILL] + leads.left[DECODE] * share) * waits.goes_on
    prefill_s = waits.ahead[PREFILL] + waits.others * columns.each[PREFILL]
    steps = np.maximum(prefill_s / ends[CHUNK], (waits.wait_s[1] - prefill_s) / ends[STEP])
    length_s = total + _last_of_each(ends[BASE] * (steps + ends[LONGEST]), ends[BASE] * ends[SCALE], waits)
    length_s[first] = np.maximum(length_s[first], leads.drain_s * waits.goes_on)
    return length_s, end_variance.take(waits.run_last)


def _last_of_each(ends_s: Floats, scale_s: Floats, waits: RunWaits) -> Floats:
    """When the last of the groups of each run [runs] ends, of ends with these means and scales [groups]: where one end later than that is
    expected, sum of exp((end - x) / scale) = 1."""
    scale_s = np.maximum(scale_s, 1e-9)
    found: Floats = np.maximum.reduceat(ends_s, waits.run_first)
    for _ in range(NEWTON_STEPS):
        later = np.exp((ends_s - found.take(waits.run)) / scale_s)
        total = np.add.reduceat(later, waits.run_first)
        found += np.log(total) * total / np.add.reduceat(later / scale_s, waits.run_first)
    return found
