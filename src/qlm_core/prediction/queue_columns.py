"""Groups of virtual queues as columns: what the model of the queue takes (`qlm_core.prediction.queue_model`), and what is known of each
beside it.

The columns of many queues are put together, cut apart and inserted into at no cost worth counting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qlm_core.prediction.prediction_service import ServiceColumns, ServiceFigures
from qlm_core.prediction.queue_model import DECODE, LEFT, PREFILL, REQUESTS, SEATS, SUMS, VARIANCE, Integers, Leads, QueueColumns
from qlm_core.statistics.normal_arrays import Floats

(ENGINE, MODEL, COUNT, SWAP, WARM, DEADLINE, BAND) = range(7)
"""Rows of what is known of a group."""
(PREFILL_BASE, PREFILL_TOKEN, LONGEST_OUTPUT, LONGEST_SCALE) = range(7, 11)
"""Rows of the work of its prompts, and of the tokens of the longest output of those in one batch: mean and Gumbel scale."""
SERVICE = 11
"""The first of the rows of `ServiceFigures`, in the order of its fields."""
ROWS = SERVICE + 12

(LEAD_HELD, LEAD_MODEL, LEAD_DRAIN, LEAD_DRAIN_VARIANCE, LEAD_LOADING) = range(SUMS, SUMS + 5)
"""The rows of what runs behind those of `Leads.left`."""
LEAD_ROWS = SUMS + 5


@dataclass(frozen=True, slots=True, eq=False)
class QueueGroups:
    """Groups of queues as columns: `rows` [ROWS, groups]; `lead` [LEAD_ROWS, queues]; `first` [queues + 1]: where each queue begins and the
    last ends; `arrivals_per_s` [queues]."""

    rows: Floats
    lead: Floats
    first: Integers
    arrivals_per_s: Floats

    @property
    def count(self) -> Floats:
        row: Floats = self.rows[COUNT]
        return row

    @property
    def service(self) -> ServiceColumns:
        return ServiceFigures(*self.rows[SERVICE:])

    @property
    def leads(self) -> Leads:
        """State of the engines, as the model of the queue takes it."""
        lead = self.lead
        return Leads(
            model=lead[LEAD_MODEL],
            left=lead[:SUMS],
            held_s=lead[LEAD_HELD],
            drain_s=lead[LEAD_DRAIN],
            drain_variance=lead[LEAD_DRAIN_VARIANCE],
            loading_s=lead[LEAD_LOADING],
        )

    def columns(self) -> QueueColumns:
        """Returns the columns of the model of the queue. Every queue has a group."""
        rows, served = self.rows, self.service
        each = np.empty((SUMS, rows.shape[1]))
        each[REQUESTS] = 1.0
        each[PREFILL] = served.prefill_work_s
        each[DECODE] = np.maximum(served.output - 1.0, 0.0) * served.token_s  # the prefill makes the first token
        each[VARIANCE] = served.output_variance * served.token_s**2
        each[SEATS] = 1.0 / served.batch
        each[LEFT] = each[SEATS] * served.batch_left_s
        return QueueColumns(first=self.first[:-1], each=each, count=rows[COUNT], model=rows[MODEL], swap_s=rows[SWAP], warm_s=rows[WARM])

    def chosen(self, numbers: Integers) -> QueueGroups:
        """Some of the queues, in any order; one that is named twice is there twice."""
        sizes = np.diff(self.first)[numbers]
        first = np.concatenate(([0], np.cumsum(sizes)))
        return QueueGroups(
            rows=self.rows[:, np.repeat(self.first[numbers] - first[:-1], sizes) + np.arange(first[-1])],
            lead=self.lead[:, numbers],
            first=first,
            arrivals_per_s=self.arrivals_per_s[numbers],
        )

    def inserted(self, places: Integers, rows: Floats) -> tuple[QueueGroups, Integers]:
        """One more group in each queue, `rows` [ROWS, queues], in front of the group with that number (the queue's end included); and the
        numbers that they have then."""
        at = places + np.arange(len(places))
        whole = np.insert(self.rows, places, rows, axis=1)
        made = QueueGroups(rows=whole, lead=self.lead, first=self.first + np.arange(len(self.first)), arrivals_per_s=self.arrivals_per_s)
        return made, at
