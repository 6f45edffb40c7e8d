"""Where new requests would be served, and when they would start and end: under earliest deadline first inside the priority bands.

On each instance that serves its model and is not draining a request would stand before the first group of a later band, or of its own band
with a later first deadline; the instance where it would end first counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from qlm_core.operations.clearing import Head, would_clear
from qlm_core.prediction.prediction_service import ServiceFigures
from qlm_core.prediction.prediction_views import GroupView, QueueView
from qlm_core.prediction.queue_columns import BAND, DEADLINE, LEAD_DRAIN, LEAD_DRAIN_VARIANCE, SERVICE, SWAP, QueueGroups
from qlm_core.prediction.queue_model import Integers
from qlm_core.prediction.queue_reader import NewRequest, NoProfile, QueueReader
from qlm_core.prediction.queue_times import queue_times
from qlm_core.prediction.request_times import RequestTable
from qlm_core.profiles.calibration import CalibratedTime
from qlm_core.statistics.distribution import Normal
from qlm_core.statistics.normal_arrays import Floats
from qlm_core.vocabulary.request import SloKind


@dataclass(frozen=True, slots=True)
class NewPlace:
    """The place of a new request: on the queue of `view` as the group `number` of `table`, behind `requests_ahead` that wait."""

    view: QueueView
    table: RequestTable
    number: int
    requests_ahead: int


def place_new(
    reader: QueueReader, views: Sequence[QueueView], groups: QueueGroups, requests: Sequence[GroupView], now_s: float | None
) -> list[NewPlace | None]:
    """New requests, each as a group of one and without the others, beside the groups of the views, which `reader` read. `now_s`: the clock
    that deadlines have; None: runs end before another model loads, also where the agent would evict them. None for one that no instance
    can be predicted for. Costs a pass over the groups for each request, all in one go on a copy of the queues for each."""
    able = [[at for at, view in enumerate(views) if may_serve(view, each.model) and _known(reader, view, each)] for each in requests]
    new = [(views[at], request) for request, each in zip(requests, able, strict=True) for at in each]
    if not new:
        return [None] * len(requests)
    groups = groups.chosen(np.array(list(chain.from_iterable(able))))
    places, rows = _places(groups, new), reader.request_rows(new)
    if now_s is not None:
        groups = replace(groups, lead=_cleared(reader, new, groups, places, rows, now_s))
    whole, numbers = groups.inserted(places, rows)
    table = RequestTable.of(queue_times(whole))
    found = table.times(numbers, np.zeros(len(new)))
    calibration = reader.profiles.calibration
    ends_s = [
        calibration.row(CalibratedTime.COMPLETION, request.model, view.instance).applied(Normal(mean, variance)).mean
        for (view, request), mean, variance in zip(new, found.completion_s.tolist(), found.completion_variance.tolist(), strict=True)
    ]
    before = np.concatenate(([0.0], np.cumsum(groups.count)))
    ahead = before[places] - before[groups.first[:-1]]
    copies = iter(range(len(new)))
    best = [min(islice(copies, len(each)), key=ends_s.__getitem__, default=None) for each in able]
    return [None if at is None else NewPlace(new[at][0], table, int(numbers[at]), int(ahead[at])) for at in best]


def may_serve(view: QueueView, model: str) -> bool:
    """Whether an instance may be given requests of a model."""
    return not view.instance.draining and model in view.instance.models


def _cleared(reader: QueueReader, new: Sequence[NewRequest], groups: QueueGroups, places: Integers, rows: Floats, now_s: float) -> Floats:
    """Runs on each instance, less those that would be evicted for its request (QLM section 5): on those where it comes first and wants
    another model. The agent has decided for a group that stands first already, and lets the runs go on."""
    lead = groups.lead.copy()
    for number in np.flatnonzero(places == groups.first[:-1]).tolist():
        view, request = new[number]
        if not view.runners or not view.running or view.active_model == request.model:
            continue
        served = ServiceFigures(*rows[SERVICE:, number])
        own_s = 0.0 if request.slo_kind is SloKind.FIRST_TOKEN else served.output * (served.step_base_s + served.sequence_s)
        head = Head(
            band=request.band,
            deadline_s=request.first_deadline_s,
            requests=1,
            service_s=float(rows[SWAP, number] + served.prefill_s + own_s),
        )
        costs = reader.eviction_costs(view)
        if would_clear(view.runners, float(lead[LEAD_DRAIN, number]), costs, head, now_s):
            lead[LEAD_DRAIN, number], lead[LEAD_DRAIN_VARIANCE, number] = 0.0, 0.0
    return lead


def _known(reader: QueueReader, view: QueueView, request: GroupView) -> bool:
    try:
        reader.engine(view, request.model)
    except NoProfile:
        return False
    return True


def _places(groups: QueueGroups, new: Sequence[NewRequest]) -> Integers:
    """The number of the group of each queue in front of which its request is placed; that of the first group behind the queue for its
    end."""
    own = np.array([(request.band, request.first_deadline_s) for _, request in new]).T
    band, deadline_s = np.repeat(own, np.diff(groups.first), axis=1)
    later = np.flatnonzero((groups.rows[BAND] > band) | ((groups.rows[BAND] == band) & (groups.rows[DEADLINE] > deadline_s)))
    following = np.append(later, band.size)[np.searchsorted(later, groups.first[:-1])]
    places: Integers = np.minimum(following, groups.first[1:])
    return places
