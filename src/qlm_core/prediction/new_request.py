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
from qlm_core.prediction.queue_reader import NoProfile, QueueReader
from qlm_core.prediction.queue_times import queue_times
from qlm_core.prediction.request_times import RequestTable
from qlm_core.profiles.calibration import CalibratedTime
from qlm_core.statistics.distribution import Normal
from qlm_core.statistics.normal_arrays import Floats
from qlm_core.vocabulary.request import SloKind


@dataclass(frozen=True, slots=True, kw_only=True)
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
    can be predicted for. Costs a pass over the groups for each request; the passes are made at once, on a copy of the queues for each."""
    able = [[at for at, view in enumerate(views) if may_serve(view, each.model) and _known(reader, view, each)] for each in requests]
    numbers = np.array(list(chain.from_iterable(able)), dtype=np.int64)
    if not numbers.size:
        return [None] * len(requests)
    chosen = [views[number] for number in numbers]
    new = [request for request, each in zip(requests, able, strict=True) for _ in each]
    queues = groups.chosen(numbers)
    places = _places(queues, new)
    rows = reader.request_rows(chosen, new)
    if now_s is not None:
        queues = replace(queues, lead=_cleared(reader, chosen, queues, places, rows, new, now_s))
    whole, at = queues.inserted(places, rows)
    table = RequestTable.of(queue_times(whole))
    found = table.times(at, np.zeros(len(at)))
    calibration = reader.profiles.calibration
    ends_s = [
        calibration.row(CalibratedTime.COMPLETION, request.model, view.instance)
        .applied(normal_at(found.completion_s, found.completion_variance, number))
        .mean
        for number, (request, view) in enumerate(zip(new, chosen, strict=True))
    ]
    copies = iter(range(len(chosen)))
    best = [min(islice(copies, len(each)), key=ends_s.__getitem__, default=None) for each in able]
    return [
        None
        if number is None
        else NewPlace(
            view=chosen[number],
            table=table,
            number=int(at[number]),
            requests_ahead=int(queues.count[queues.first[number] : places[number]].sum()),
        )
        for number in best
    ]


def may_serve(view: QueueView, model: str) -> bool:
    """Whether an instance may be given requests of a model."""
    return not view.instance.draining and model in view.instance.models


def normal_at(mean: Floats, variance: Floats, at: int) -> Normal:
    """One of the normals that two arrays hold."""
    return Normal(float(mean[at]), float(variance[at]))


def _cleared(
    reader: QueueReader,
    views: Sequence[QueueView],
    groups: QueueGroups,
    places: Integers,
    rows: Floats,
    requests: Sequence[GroupView],
    now_s: float,
) -> Floats:
    """Runs on each instance, less those that would be evicted for its request (QLM section 5): on those where it comes first and wants
    another model. The agent has decided for a group that stands first already, and lets the runs go on."""
    lead = groups.lead.copy()
    for number in np.flatnonzero(places == groups.first[:-1]).tolist():
        view, request = views[number], requests[number]
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


def _places(groups: QueueGroups, requests: Sequence[GroupView]) -> Integers:
    """The number of the group of each queue in front of which its request is placed; that of the first group behind the queue for its
    end."""
    own = np.array([(each.band, each.first_deadline_s) for each in requests]).T
    band, deadline_s = np.repeat(own, np.diff(groups.first), axis=1)
    later = np.flatnonzero((groups.rows[BAND] > band) | ((groups.rows[BAND] == band) & (groups.rows[DEADLINE] > deadline_s)))
    following = np.append(later, band.size)[np.searchsorted(later, groups.first[:-1])]
    places: Integers = np.minimum(following, groups.first[1:])
    return places
