"""How long a run of groups of one model takes until all of it has ended, and the next model may come (QLM equation 10).

By then all its prefills are done, and all that its sequences add to the steps that they decode in; and there was the base of each step
until the longest output of the last to start has ended. Any group of the run may hold that one. The end of each is taken to be Gumbel's, as
the largest of many are (Gumbel, Statistics of extremes, 1958): a little later it is half as likely to be later still. So the groups add up
like more requests of the one that ends last.
"""

from __future__ import annotations

import numpy as np

from qlm_core.normal_arrays import Floats
from qlm_core.queue_model import DECODE, PREFILL, Leads, QueueColumns, RunWaits

(SHARED, BASE, STEP, CHUNK, LONGEST) = range(5)
"""Rows of what ends a run, of one request of a group: seconds that its output adds to steps; the base of a step; a step of a full batch;
the prefill that one step takes in; and the tokens of the longest output among those of the group that are in one batch."""
ENDS = 5


def run_lengths(
    columns: QueueColumns, leads: Leads, waits: RunWaits, ends: Floats, end_variance: Floats, longest_more: Floats | None = None
) -> tuple[Floats, Floats]:
    """Means and variances [runs]. `ends` [ENDS, groups]; `end_variance` [groups]: of the end of each group. `longest_more` [groups]: by how
    many tokens the longest output would be longer among twice as many; None: the group that ends last counts alone. What runs already and
    is of the run's model ends with it."""
    first = waits.queue_run
    total = np.add.reduceat(columns.count * (columns.each[PREFILL] + ends[SHARED]), waits.run_first)
    decode_s = columns.each[DECODE].take(columns.first)
    share = np.divide(ends[SHARED].take(columns.first), decode_s, out=np.zeros_like(decode_s), where=decode_s > 0.0)
    total[first] += (leads.left[PREFILL] + leads.left[DECODE] * share) * waits.goes_on
    prefill_s = waits.ahead[PREFILL] + waits.others * columns.each[PREFILL]
    steps = np.maximum(prefill_s / ends[CHUNK], (waits.wait_s[1] - prefill_s) / ends[STEP])
    length_s = total + _last_end(ends[BASE] * (steps + ends[LONGEST]), ends[BASE], longest_more, waits)
    length_s[first] = np.maximum(length_s[first], leads.drain_s * waits.goes_on)
    return length_s, end_variance.take(waits.run_last)


def _last_end(end_s: Floats, base_s: Floats, longest_more: Floats | None, waits: RunWaits) -> Floats:
    """The last of the ends of each run's groups, [runs]."""
    last: Floats = np.maximum.reduceat(end_s, waits.run_first)
    if longest_more is None or len(last) == len(end_s):
        return last
    halves_s = np.maximum(base_s * longest_more, 1e-12)
    before_s = last.take(waits.run) - end_s
    groups = np.add.reduceat(np.exp2(-before_s / halves_s), waits.run_first)
    last += np.maximum.reduceat(halves_s * (before_s <= 0.0), waits.run_first) * np.log2(groups)
    return last
