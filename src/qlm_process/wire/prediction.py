"""Predictions on the wire (prediction.proto): quantiles of the distributions of `qlm_core.prediction.prediction_service`."""

from __future__ import annotations

import math

from qlm.api.v1 import prediction_pb2
from qlm_core.prediction.prediction_views import RequestPrediction, probability_late
from qlm_core.vocabulary.request import Slo, SloKind


def to_proto(prediction: RequestPrediction, slo: Slo | None = None, elapsed_s: float = 0.0) -> prediction_pb2.Prediction:
    """`slo`: what the request is judged by, None: nothing. `elapsed_s`: seconds since its acceptance."""
    wait_p50_s, completion_p50_s = prediction.quantiles_s(0.5)
    wait_p90_s, completion_p90_s = prediction.quantiles_s(0.9)
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
