"""Refusal at admission: a request that would be late is refused before it is accepted (`planner.overload: refuse`). Pure.

The gateway judges by the prediction that it would give the client. Waits that the planner published longer ago than WAITS_AGE_MAX_S, or
none, refuse nobody; nor is a request without a deadline refused.
"""

from __future__ import annotations

import math

from qlm_core.prediction.prediction_views import RequestPrediction, probability_late
from qlm_core.vocabulary.errors import QueueFull
from qlm_core.vocabulary.overload import WOULD_BE_LATE
from qlm_core.vocabulary.request import Slo, SloKind

WAITS_AGE_MAX_S = 6.0
"""Older waits refuse nobody: the planner publishes them every half second, behind very many groups every 5 s."""

LATE_PROBABILITY = 0.5
"""A request that is late with this probability or a greater one is refused: most of those that are let in are in time."""

RETRY_MIN_S = 0.5
RETRY_MAX_S = 300.0


def late_refusal(prediction: RequestPrediction | None, slo: Slo, *, age_s: float, drain_per_s: float) -> QueueFull | None:
    """The error for a request that would be late, None for one that may enter. `drain_per_s`: requests that end in a second on the
    instance of the prediction, as measured; it says when so many of those ahead, who wait for the same one, will have gone that a
    request like this one would be in time."""
    if prediction is None or age_s > WAITS_AGE_MAX_S or slo.kind is SloKind.PRIORITY or not math.isfinite(slo.seconds):
        return None
    first_token = slo.kind is SloKind.FIRST_TOKEN
    judged = prediction.wait.shifted(prediction.prefill_s) if first_token else prediction.completion
    late = probability_late(judged, slo.seconds, 0.0)
    if not late >= LATE_PROBABILITY:  # also for NaN
        return None
    over_s = max(0.0, judged.mean - slo.seconds)
    wait_s = max(prediction.wait.mean, 1e-9)
    too_many = prediction.requests_ahead * min(1.0, over_s / wait_s)
    retry_s = too_many / drain_per_s if drain_per_s > 0.0 else RETRY_MAX_S
    return QueueFull(
        f"a request like this would end {over_s:.1f} s beyond its SLO, with {prediction.requests_ahead} ahead of it",
        reason=WOULD_BE_LATE,
        details={
            "probability_late": f"{late:.2f}",
            "retry_after_s": f"{min(max(retry_s, RETRY_MIN_S), RETRY_MAX_S):.3f}",
        },
    )
