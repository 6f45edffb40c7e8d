"""Times of all groups of virtual queues: C = W + P + D with epsilon (QLM equations 1 to 5) over the model of the queue.

P goes in chunks that ride along with the decode steps of running requests. D is by its batch and by the requests that join it
meanwhile: those behind it, and those expected to arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qlm_core.prediction.prediction_service import ServiceColumns, longest_of_each
from qlm_core.prediction.queue_columns import LONGEST_OUTPUT, LONGEST_SCALE, PREFILL_BASE, PREFILL_TOKEN, QueueGroups
from qlm_core.prediction.queue_model import REQUESTS, QueueColumns, RunWaits, run_starts, run_waits
from qlm_core.statistics.normal_arrays import Floats
from qlm_core.statistics.run_lengths import BASE, CHUNK, ENDS, LONGEST, SCALE, SHARED, STEP, run_lengths
from qlm_core.vocabulary.instance import PREFILL_CHUNK_TOKENS

ARRIVAL_ROUNDS = 3
"""Rounds of the fixed point of arrivals: requests that arrive during a run prolong it, so that more arrive."""


@dataclass(frozen=True, slots=True, eq=False)
class QueueTimes:
    """Seconds from now. `start_s`, `start_variance` [groups]: of the group's run. As pairs of the first and the last request of each group,
    [2, groups]: `wait_s`, `wait_variance`; `chunk_s`: what rides along with one chunk of its prefill; `prefill_s`; `token_s`: of one output
    token. `end_s`, `end_variance` [groups]: of the whole group, the maximum over its requests."""

    groups: QueueGroups
    columns: QueueColumns
    waits: RunWaits
    start_s: Floats
    start_variance: Floats
    wait_s: Floats
    wait_variance: Floats
    chunk_s: Floats
    prefill_s: Floats
    token_s: Floats
    end_s: Floats
    end_variance: Floats


def queue_times(groups: QueueGroups) -> QueueTimes:
    """The times of queues that have a group each. Costs O(groups)."""
    columns, leads, served = groups.columns(), groups.leads, groups.service
    waits = run_waits(columns, leads)
    ahead = waits.ahead[REQUESTS]
    longest = groups.rows[LONGEST_OUTPUT]
    _, spread = longest_of_each(served.output, served.output_variance, np.clip(columns.count, 1.0, served.batch))
    in_flight = ahead + columns.count
    drain_s = served.drain(longest, in_flight, (in_flight > served.batch).astype(np.float64), waits.behind)
    drain_variance = spread * served.step_base_s**2
    chunk_s = _step_beside(served, groups.rows[PREFILL_BASE], np.array((ahead, ahead + waits.others)))
    prefill_s = served.prefill_work_s + np.maximum(1.0, served.prefill_tokens / PREFILL_CHUNK_TOKENS) * chunk_s
    ended_s = waits.wait_s[1] + prefill_s[1] + drain_s
    ended_variance = waits.wait_variance[1] + drain_variance
    starts, variances, _ = run_starts(columns, leads, waits, *run_lengths(columns, leads, waits, _ends(groups, served), ended_variance))
    start_s, start_variance = starts[waits.run], variances[waits.run]
    wait_s = start_s + waits.wait_s
    return QueueTimes(
        groups=groups,
        columns=columns,
        waits=waits,
        start_s=start_s,
        start_variance=start_variance,
        wait_s=wait_s,
        wait_variance=start_variance + waits.wait_variance,
        chunk_s=chunk_s,
        prefill_s=prefill_s,
        token_s=_token_s(groups, served, waits, wait_s),
        end_s=start_s + ended_s,
        end_variance=start_variance + ended_variance,
    )


def _ends(groups: QueueGroups, served: ServiceColumns) -> Floats:
    """Ends of the runs, as `qlm_core.statistics.run_lengths` takes it."""
    ends = np.empty((ENDS, groups.count.size))
    ends[BASE], ends[STEP] = served.step_base_s, served.step_s
    ends[LONGEST], ends[SCALE] = groups.rows[LONGEST_OUTPUT], groups.rows[LONGEST_SCALE]
    ends[SHARED] = served.output * (served.token_s - served.step_base_s / served.batch)
    ends[CHUNK] = np.maximum(groups.rows[PREFILL_TOKEN] * PREFILL_CHUNK_TOKENS, 1e-12)
    return ends


def _step_beside(served: ServiceColumns, base_s: Floats, others: Floats) -> Floats:
    """Seconds of a step with a chunk of a prefill: its decode part if anybody decodes, else the base of a prefill."""
    beside = np.minimum(others, served.batch)
    return np.where(beside >= 1.0, served.step_base_s + served.sequence_s * beside, base_s)


def _token_s(groups: QueueGroups, served: ServiceColumns, waits: RunWaits, wait_s: Floats) -> Floats:
    """Seconds of an output token of the first and the last request of each group.

    Beside a request those decode that have a seat when it starts, and those that get one while it runs: at once where seats are free, else
    as others end. Those there at its start leave halfway through its run on average, and later ones are there for half of it."""
    behind = np.array((waits.others + waits.behind, waits.behind))
    ahead = waits.ahead[REQUESTS] + np.array((np.zeros_like(waits.others), waits.others)) + 1.0
    at_once = np.clip(served.batch - ahead, 0.0, behind)
    began = np.minimum(served.batch, ahead + at_once)
    later = behind - at_once
    token_s = _token_among(served, began, at_once, later)
    if groups.arrivals_per_s.any():
        rate = _rate_of_last_runs(groups, waits)
        for _ in range(ARRIVAL_ROUNDS):
            token_s = _token_among(served, began, at_once, later + rate * (wait_s + served.output * token_s))
    return token_s


def _token_among(served: ServiceColumns, began: Floats, at_once: Floats, later: Floats) -> Floats:
    """`began`: in the batch at its start, `at_once` of them just behind it; `later`: waiting for seats meanwhile."""
    joining = np.minimum(later, began)
    return served.decode_token_s(1.0 + (began - 1.0 + joining) / 2.0, at_once + joining)


def _rate_of_last_runs(groups: QueueGroups, waits: RunWaits) -> Floats:
    """Arrivals a second for each group: they arrive at the end of the queue, so they join its last run alone."""
    queues = len(groups.first) - 1
    last_group = groups.first[1:] - 1
    rate = np.zeros(len(waits.run_first))
    rate[waits.run[last_group]] = groups.arrivals_per_s[:queues]
    found: Floats = rate[waits.run]
    return found
