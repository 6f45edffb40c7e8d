"""Predictions that planner, gateway and estimator share: C = W + P + D over the profiles of one snapshot (QLM section 6).

- `prediction_service`: classes of requests on one engine: Theta, work, decode time with epsilon.
- `prediction_views`: what is known of a virtual queue.
- `queue_columns`, `queue_model`, `queue_times`: the one model of virtual queues, on arrays.
- `request_times`, `new_request`: of single requests and their deadlines, and of one that comes.
- `assessment`: all of it for queues that change.
- this module: names that the others import.
"""

from __future__ import annotations

from qlm_core.distribution import Normal
from qlm_core.prediction_service import Service, service
from qlm_core.prediction_views import GroupView, QueueView, RequestPrediction, RunningView

__all__ = ["GroupView", "QueueView", "RequestPrediction", "RunningView", "Service", "probability_late", "service"]


def probability_late(completion: Normal, deadline_s: float, now_s: float) -> float:
    """P(late) of something that ends `completion` seconds after now. An infinite deadline is never missed, one that has passed is: the tail
    of a normal below zero is none of a time to come."""
    return 1.0 if deadline_s <= now_s else completion.probability_above(deadline_s - now_s)
