"""The prediction for a request at its arrival, and the report of its end to the estimator's machine."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.estimator.workloads import Arrival
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_estimator.predictions import Predicted, PredictedQuantiles


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for a request at its arrival, in seconds from there. `wait_s`, `completion_s`: p50, p90 and p99; `own_wait`,
    `own_completion`: before calibration."""

    instance: str
    depth: int
    version: int
    wait_s: tuple[float, float, float]
    completion_s: tuple[float, float, float]
    own_wait: Normal
    own_completion: Normal


def predicted(request: Arrival, made: Prediction, at_s: float, facts: InstanceFacts) -> Predicted:
    """A prediction made at `at_s` for an instance, as the estimator's shell reports it."""
    return Predicted(
        queue_id=str(request.number),
        at_s=at_s,
        completion=PredictedQuantiles(made.completion_s, own=made.own_completion),
        wait=PredictedQuantiles(made.wait_s, own=made.own_wait),
        model=request.model,
        gpu=facts.gpu,
        n_gpu=facts.n_gpu,
        instance=made.instance,
        requests_ahead=made.depth,
    )
