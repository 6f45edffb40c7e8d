"""The Estimator service. A standby answers as well, all but outcomes: what else it needs is in the queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import grpc.aio

from qlm.api.v1 import estimator_pb2, estimator_pb2_grpc, prediction_pb2
from qlm_core.errors import InvalidRequest, NotFound, PreconditionFailed, Unavailable, invalid_field
from qlm_core.group import slo_class, token_class
from qlm_core.model import ModelSpec
from qlm_core.prediction import QueueView, RequestPrediction, predict_request
from qlm_core.profile import ProfileSnapshot
from qlm_core.request import Slo
from qlm_core.slo_rules import checked_slo
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.outcomes import WINDOW_MAX_S, OutcomesOfTerm
from qlm_estimator.outcomes_wire import to_proto as outcomes_message
from qlm_process import profile_wire
from qlm_process.queue_views import queue_views
from qlm_process.server_clock import ServerClock
from qlm_queue.port import Queue
from qlm_queue.values import ESTIMATOR_ROLE

Context = grpc.aio.ServicerContext[Any, Any]

RETRY_AFTER_S = 1.0
"""Hint where no prediction can be made: an instance may come."""

WINDOW_S = 300.0
"""Of GetOutcomes where none is asked for."""


class EstimatorService(estimator_pb2_grpc.EstimatorServicer):
    """`fresh_s`: age up to which a reading of the queue is used again, so that the queue's load does not grow with the calls."""

    def __init__(
        self,
        *,
        queue: Queue,
        clock: ServerClock,
        catalogue: Mapping[str, ModelSpec],
        shipped: ProfileSnapshot,
        metrics: EstimatorMetrics,
        fresh_s: float,
        outcomes: OutcomesOfTerm,
    ) -> None:
        self._outcomes = outcomes
        self._queue = queue
        self._clock = clock
        self._catalogue = catalogue
        self._snapshot = shipped
        self._metrics = metrics
        self._fresh_s = fresh_s
        self._reading = asyncio.Lock()
        self._views: tuple[QueueView, ...] = ()
        self._read_s = -math.inf

    async def GetProfiles(  # noqa: N802 (gRPC names it)
        self, request: estimator_pb2.GetProfilesRequest, context: Context
    ) -> estimator_pb2.ProfileSnapshot:
        """The newest snapshot; version 0, the shipped one, where none was published."""
        return profile_wire.to_proto(await self._newest())

    async def Predict(  # noqa: N802 (gRPC names it)
        self, request: estimator_pb2.PredictRequest, context: Context
    ) -> estimator_pb2.PredictResponse:
        """Raises NotFound, InvalidRequest, or Unavailable (NO_PREDICTION) where no instance of the model can be predicted."""
        with self._metrics.predict_seconds.time():
            spec, slo = _checked(request, self._catalogue)
            snapshot, views = await self._now()
            now_s = self._clock.now_s()
            found = predict_request(
                views,
                self._catalogue,
                snapshot,
                spec.name,
                request.prompt_tokens,
                request.output_tokens_max,
                math.inf if slo is None else slo.deadline_s(now_s),
                slo_class="" if slo is None else slo_class(slo),
                token_class=token_class(request.prompt_tokens),
            )
            if found is None:
                raise Unavailable(
                    f"no instance of {spec.name} can be predicted now",
                    reason="NO_PREDICTION",
                    details={"model": spec.name, "retry_after_s": str(RETRY_AFTER_S)},
                )
            return estimator_pb2.PredictResponse(prediction=_to_proto(found))

    async def GetOutcomes(  # noqa: N802 (gRPC names it)
        self, request: estimator_pb2.GetOutcomesRequest, context: Context
    ) -> estimator_pb2.Outcomes:
        """Raises InvalidRequest, and PreconditionFailed (NOT_LEADER) on a standby."""
        if not 0.0 <= request.window_s <= WINDOW_MAX_S:
            raise invalid_field("window_s", f"from 0 to {WINDOW_MAX_S:g}")
        outcomes = self._outcomes.current
        if outcomes is None:
            address = await self._queue.leader_address(ESTIMATOR_ROLE)
            raise PreconditionFailed("this estimator is a standby", reason="NOT_LEADER", details={"leader": address})
        return outcomes_message(outcomes.report(self._clock.now_s(), request.window_s or WINDOW_S))

    async def _now(self) -> tuple[ProfileSnapshot, tuple[QueueView, ...]]:
        """The profiles and the queue, read together and at most `fresh_s` ago; one reading serves all calls that wait for it."""
        async with self._reading:
            now_s = self._clock.now_s()
            if not 0.0 <= now_s - self._read_s <= self._fresh_s:
                await self._newest()
                self._views = queue_views(await self._queue.overview())
                self._read_s = now_s
            return self._snapshot, self._views

    async def _newest(self) -> ProfileSnapshot:
        version, body = await self._queue.read_profiles()
        if body and version != self._snapshot.version:
            self._snapshot = profile_wire.from_body(body)
        return self._snapshot


def _checked(request: estimator_pb2.PredictRequest, catalogue: Mapping[str, ModelSpec]) -> tuple[ModelSpec, Slo | None]:
    """The model and the SLO of a request; no SLO stands for none at all, behind everything."""
    spec = catalogue.get(request.model)
    if spec is None:
        raise NotFound(f"no model {request.model!r}", reason="UNKNOWN_MODEL", details={"model": request.model})
    for field, value in (("prompt_tokens", request.prompt_tokens), ("output_tokens_max", request.output_tokens_max)):
        if value < 1:
            raise invalid_field(field, ">= 1")
    if request.prompt_tokens >= spec.context_tokens_max:
        raise InvalidRequest(
            f"a prompt of {request.prompt_tokens} tokens leaves no room in a context of {spec.context_tokens_max}",
            reason="PROMPT_TOO_LONG",
            details={"prompt_tokens": str(request.prompt_tokens), "context_tokens_max": str(spec.context_tokens_max)},
        )
    slo = request.slo
    return spec, checked_slo(slo.kind, slo.seconds, slo.priority) if request.HasField("slo") else None


def _to_proto(found: RequestPrediction) -> prediction_pb2.Prediction:
    """A normal has a tail below zero; a time from now has none."""
    return prediction_pb2.Prediction(
        wait_p50_s=max(0.0, found.wait.quantile(0.5)),
        wait_p90_s=max(0.0, found.wait.quantile(0.9)),
        completion_p50_s=max(0.0, found.completion.quantile(0.5)),
        completion_p90_s=max(0.0, found.completion.quantile(0.9)),
        requests_ahead=found.requests_ahead,
        profile_version=found.profile_version,
    )
