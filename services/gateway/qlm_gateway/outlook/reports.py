"""Predictions that clients were shown at acceptance: a sample, which the estimator compares with what happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qlm.internal.v1.events_pb2 import EVENT_KIND_PREDICTED, Moments, RequestEvent
from qlm_core.prediction.prediction_views import RequestPrediction
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.instance import InstanceFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionReport:
    """A prediction of a new request of `model`, and the instance that it is for, where that is known."""

    queue_id: str
    accepted_s: float
    model: str
    prediction: RequestPrediction
    instance: InstanceFacts | None = None

    def event(self) -> RequestEvent:
        """As the event stream carries it."""
        wait_p50_s, completion_p50_s = self.prediction.quantiles_s(0.5)
        wait_p90_s, completion_p90_s = self.prediction.quantiles_s(0.9)
        wait_p99_s, completion_p99_s = self.prediction.quantiles_s(0.99)
        return RequestEvent(
            kind=EVENT_KIND_PREDICTED,
            queue_id=self.queue_id,
            accepted_ms=round(self.accepted_s * 1000.0),
            model=self.model,
            predicted_p50_s=completion_p50_s,
            predicted_p90_s=completion_p90_s,
            predicted_p99_s=completion_p99_s,
            predicted_wait_p50_s=wait_p50_s,
            predicted_wait_p90_s=wait_p90_s,
            predicted_wait_p99_s=wait_p99_s,
            instance=self.prediction.instance,
            gpu="" if self.instance is None else self.instance.gpu,
            n_gpu=0 if self.instance is None else self.instance.n_gpu,
            requests_ahead=self.prediction.requests_ahead,
            profile_version=self.prediction.profile_version,
            own_wait=_moments(self.prediction.own_wait),
            own_completion=_moments(self.prediction.own_completion),
        )


class PredictionSample:
    """Up to `most` of those added since the last `take`, each with the same chance (Vitter, algorithm R, "Random sampling with a
    reservoir", 1985): the first ones of a burst have the fewest requests ahead. `random`: uniform in [0, 1)."""

    def __init__(self, most: int, random: Callable[[], float]) -> None:
        self._most = most
        self._random = random
        self._kept: list[PredictionReport] = []
        self._seen = 0

    def add(self, report: PredictionReport) -> None:
        self._seen += 1
        if len(self._kept) < self._most:
            self._kept.append(report)
            return
        place = int(self._random() * self._seen)
        if place < self._most:
            self._kept[place] = report

    def take(self) -> list[PredictionReport]:
        """The sample, which begins anew."""
        kept, self._kept, self._seen = self._kept, [], 0
        return kept


def _moments(own: Normal | None) -> Moments | None:
    return None if own is None else Moments(mean_s=own.mean, variance_s2=own.variance)
