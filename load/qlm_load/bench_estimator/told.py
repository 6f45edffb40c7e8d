"""What is said of a request at its arrival, and what the estimator's machine is told of it once it has ended."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_core.distribution import Normal
from qlm_core.instance import InstanceFacts
from qlm_estimator.predictions import Judged, Predicted, Told
from qlm_load.bench_estimator.truth import Happened
from qlm_load.bench_estimator.workloads import Arrival


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was said of a request at its arrival: seconds from there. `own_wait`, `own_completion`: before calibration."""

    instance: str
    depth: int
    version: int
    wait: Normal
    completion: Normal
    own_wait: Normal
    own_completion: Normal


def judged(request: Arrival, made: Prediction, at_s: float, facts: InstanceFacts, started_s: float, ended: Happened) -> Judged:
    """A prediction that was made at `at_s` for an instance, and what came, as the estimator's shell tells it."""
    predicted = Predicted(
        queue_id=str(request.number),
        at_s=at_s,
        completion=_told(made.completion, made.own_completion),
        wait=_told(made.wait, made.own_wait),
        model=ended.model,
        gpu=facts.gpu,
        n_gpu=facts.n_gpu,
        instance=made.instance,
        requests_ahead=made.depth,
        profile_version=made.version,
    )
    wait_s = started_s - request.arrival_s
    return Judged(predicted=predicted, at_s=ended.at_s, completion_s=ended.at_s - request.arrival_s, wait_s=wait_s)


def _told(time: Normal, own: Normal) -> Told:
    return Told(p50_s=max(0.0, time.quantile(0.5)), p90_s=max(0.0, time.quantile(0.9)), p99_s=max(0.0, time.quantile(0.99)), own=own)
