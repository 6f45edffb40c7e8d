"""Predictions on the wire (prediction.proto): quantiles of the distributions of `qlm_core.prediction_service`."""

from __future__ import annotations

import math

from qlm.api.v1 import prediction_pb2
from qlm_core.prediction_views import RequestPrediction, probability_late
from qlm_core.request import Slo, SloKind


def quantiles_s(prediction: RequestPrediction, level: float) -> tuple[float, float]:
    """The same quantile of wait and completion, in seconds from now. A normal has a tail below zero, such a time has none; and what was
    learned of either apart from the other leaves nobody ending before the prefill of a start at that quantile is done."""
    wait_s = max(0.0, prediction.wait.quantile(level))
    return wait_s, max(wait_s + prediction.prefill_s, prediction.completion.quantile(level))


def to_proto(prediction: RequestPrediction, slo: Slo | None = None, elapsed_s: float = 0.0) -> prediction_pb2.Prediction:
    """`slo`: what the request is judged by, None: nothing. `elapsed_s`: seconds since its acceptance."""
    wait_p50_s, completion_p50_s = quantiles_s(prediction, 0.5)
    wait_p90_s, completion_p90_s = quantiles_s(prediction, 0.9)
    return prediction_pb2.Prediction(
        wait_p50_s=wait_p50_s,
        wait_p90_s=wait_p90_s,
        completion_p50_s=completion_p50_s,
        completion_p90_s=completion_p90_s,
        requests_ahead=prediction.requests_ahead,
        profile_version=prediction.profile_version,
        probability_late=_probability_late(prediction, slo, elapsed_s),
    )


def _probability_late(prediction: RequestPrediction, slo: Slo | None, elapsed_s: float) -> float | None:
    if slo is None or slo.kind is SloKind.PRIORITY or not math.isfinite(slo.seconds):
        return None
    first_token = slo.kind is SloKind.FIRST_TOKEN
    judged = prediction.wait.shifted(prediction.prefill_s) if first_token else prediction.completion
    return probability_late(judged, slo.deadline_s(0.0), elapsed_s)
