"""Predictions that planner, gateway and estimator share: C = W + P + D over the profiles of one snapshot (QLM section 6).

- `prediction_service`: one class of requests on one engine: Theta, work, decode time with epsilon.
- `prediction_views`: what is known of a virtual queue, and what is said of each group.
- `prediction_queue`: the groups of a virtual queue: waiting and completion, with model swaps.
- this module: a new request on the best instance, and lateness against deadlines. Its names are what the others import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from qlm_core.distribution import Normal
from qlm_core.errors import Unavailable
from qlm_core.model import ModelSpec
from qlm_core.prediction_queue import group_times
from qlm_core.prediction_service import Service, service, service_time, throughput_tokens_per_s
from qlm_core.prediction_views import GroupTime, GroupView, QueueView
from qlm_core.profile import ProfileSnapshot
from qlm_core.request import SloKind

__all__ = [
    "GroupTime",
    "GroupView",
    "QueueView",
    "RequestPrediction",
    "Service",
    "expected_late",
    "expected_tardiness_s",
    "group_times",
    "predict_request",
    "probability_late",
    "service",
    "service_time",
    "throughput_tokens_per_s",
]

_Cost = Callable[[Normal, float], float]
"""Of (end in seconds from now, deadline)."""

LATENESS_POINTS = 16
"""Requests of a group that lateness is worked out for; the others lie between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPrediction:
    """When a new request would start and end, in seconds from now, on the instance where it would end first."""

    instance: str
    wait: Normal
    completion: Normal
    requests_ahead: int
    profile_version: int


def predict_request(
    views: Sequence[QueueView],
    catalogue: Mapping[str, ModelSpec],
    profiles: ProfileSnapshot,
    model: str,
    prompt_tokens: int,
    output_tokens_max: int,
    deadline_s: float,
    *,
    slo_class: str = "",
    token_class: str = "",
) -> RequestPrediction | None:
    """A new request under earliest deadline first: on each instance that serves the model and is not draining it would come
    before the first group whose first deadline is later than `deadline_s` (seconds of the queue's clock; infinite: the end).
    None where no such instance can be predicted. Costs O(groups of those instances). Raises ValueError for counts below 1 and
    a NaN deadline."""
    if prompt_tokens < 1 or output_tokens_max < 1 or math.isnan(deadline_s):
        raise ValueError("prompt_tokens and output_tokens_max are >= 1, a deadline is a number")
    request = GroupView(
        group_id="",
        model=model,
        slo_class=slo_class,
        token_class=token_class,
        waiting=1,
        waiting_prompt_tokens=prompt_tokens,
        first_deadline_s=deadline_s,
        output_tokens_max=float(output_tokens_max),
    )
    best: RequestPrediction | None = None
    for view in views:
        if view.instance.draining or model not in view.instance.models:
            continue
        found = _predict_on(view, catalogue, profiles, request)
        if found is not None and (best is None or found.completion.mean < best.completion.mean):
            best = found
    return best


def _predict_on(
    view: QueueView, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot, request: GroupView
) -> RequestPrediction | None:
    later = (place for place, group in enumerate(view.groups) if group.first_deadline_s > request.first_deadline_s)
    place = next(later, len(view.groups))
    with_request = replace(view, groups=(*view.groups[:place], request, *view.groups[place:]))
    try:
        time = group_times(with_request, catalogue, profiles)[place]
    except Unavailable:
        return None
    return RequestPrediction(
        instance=view.instance.name,
        wait=time.wait,
        completion=time.first_completion,
        requests_ahead=sum(group.waiting for group in view.groups[:place]),
        profile_version=profiles.version,
    )


def probability_late(completion: Normal, deadline_s: float, now_s: float) -> float:
    """P(late) of something that ends `completion` seconds after now. An infinite deadline is never missed."""
    return completion.probability_above(deadline_s - now_s)


def expected_late(group: GroupView, time: GroupTime, now_s: float) -> float:
    """Expected number of late requests of a group under first come first served, each with its own deadline."""
    return group.waiting * _mean_over_requests(group, time, lambda end, deadline_s: probability_late(end, deadline_s, now_s))


def expected_tardiness_s(group: GroupView, time: GroupTime, now_s: float) -> float:
    """Expected sum over a group's requests of the seconds that each ends after its deadline."""
    return group.waiting * _mean_over_requests(group, time, lambda end, deadline_s: end.expected_excess(deadline_s - now_s))


def _mean_over_requests(group: GroupView, time: GroupTime, cost: _Cost) -> float:
    """The mean of a cost over the requests of a group, whose ends and deadlines go evenly from those of the first to those of the last."""
    if group.slo_kind is SloKind.PRIORITY or group.waiting == 0 or group.first_deadline_s == math.inf:
        return 0.0
    if group.slo_kind is SloKind.FIRST_TOKEN:
        first, last = time.wait.shifted(time.prefill_s), time.last_wait.shifted(time.prefill_s)
    else:
        first, last = time.first_completion, time.last_completion
    span_s = 0.0 if group.last_deadline_s is None else group.last_deadline_s - group.first_deadline_s
    points = min(group.waiting, LATENESS_POINTS)
    total = 0.0
    for point in range(points):
        share = (point + 0.5) / points
        end = Normal(first.mean + share * (last.mean - first.mean), first.variance + share * (last.variance - first.variance))
        total += cost(end, group.first_deadline_s + share * span_s)
    return total / points
