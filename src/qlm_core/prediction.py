"""Predictions that planner, gateway and estimator share: C = W + P + D over the profiles of one snapshot (QLM section 6).

- `prediction_service`: one class of requests on one engine: Theta, work, decode time with epsilon. `service_arrays`: of many.
- `prediction_views`: what is known of a virtual queue, and what is said of each group.
- `queue_columns`, `queue_model`, `queue_times`: the one model of virtual queues, on arrays; `prediction_queue`: the groups of one as
values.
- `request_times`, `lateness`, `new_request`: of single requests, of their deadlines, and of one that comes.
- `assessment`: all of it for queues that change.
- this module: a new request for callers with views at hand. Its names are what the others import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qlm_core.distribution import Normal
from qlm_core.model import ModelSpec
from qlm_core.new_request import may_serve, predict_new
from qlm_core.prediction_queue import group_times
from qlm_core.prediction_service import Service, service, service_time, throughput_tokens_per_s
from qlm_core.prediction_views import GroupTime, GroupView, QueueView, RequestPrediction, RunningView
from qlm_core.profile import ProfileSnapshot
from qlm_core.queue_reader import QueueReader

__all__ = [
    "GroupTime",
    "GroupView",
    "QueueView",
    "RequestPrediction",
    "RunningView",
    "Service",
    "group_times",
    "predict_request",
    "probability_late",
    "service",
    "service_time",
    "throughput_tokens_per_s",
]


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
    band: int = 0,
    output_tokens: Normal | None = None,
    now_s: float | None = None,
) -> RequestPrediction | None:
    """A new request under earliest deadline first: on each instance that serves the model and is not draining it would come
    before the first group of a later priority band than `band`, or of that band with a first deadline later than `deadline_s` (seconds of
    the queue's clock; infinite: the end of the band, where PRIORITY requests come). `output_tokens`: expected of it under its limit,
    where more is known than its class. `now_s`: the queue's clock, to tell where what runs would be evicted for it. None where no
    such instance can be predicted. Costs O(groups of those instances); for many requests on the same queues see `qlm_core.assessment`.
    Raises ValueError for counts below 1 and a NaN deadline."""
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
        band=band,
        output_tokens=output_tokens,
    )
    reader = QueueReader(catalogue, profiles)
    kept, groups = reader.read(view for view in views if may_serve(view, model))
    return predict_new(reader, kept, groups, request, now_s)


def probability_late(completion: Normal, deadline_s: float, now_s: float) -> float:
    """P(late) of something that ends `completion` seconds after now. An infinite deadline is never missed, one that has passed is: the tail
    of a normal below zero is none of a time to come."""
    return 1.0 if deadline_s <= now_s else completion.probability_above(deadline_s - now_s)
