"""The Estimator service. A standby answers as well, all but outcomes: what else it needs is in the queue."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import grpc.aio

from qlm.api.v1 import estimator_pb2, estimator_pb2_grpc
from qlm_core.errors import InvalidRequest, NotFound, PreconditionFailed, Unavailable, invalid_field
from qlm_core.group import prompt_class, slo_class, token_class
from qlm_core.importable_profiles import ROWS_MAX, importable
from qlm_core.length_features import LengthFacts
from qlm_core.length_model import WEIGHTS_MAX
from qlm_core.model import ModelSpec
from qlm_core.name_rules import check_application, checked_tenant
from qlm_core.new_request import slo_band
from qlm_core.prediction_views import GroupView
from qlm_core.profile import ProfileSnapshot
from qlm_core.request import Slo, SloKind
from qlm_core.slo_rules import checked_slo
from qlm_estimator.assessment_wire import assessment_message
from qlm_estimator.metrics import EstimatorMetrics
from qlm_estimator.outcomes.report import WINDOW_MAX_S
from qlm_estimator.outcomes.wire import to_proto as outcomes_message
from qlm_estimator.readings import QueueReader, Reading
from qlm_estimator.shell import EstimatorShell
from qlm_process.queue.clock import ServerClock
from qlm_process.wire import prediction as prediction_wire
from qlm_process.wire import profile as profile_wire
from qlm_queue.port import Queue
from qlm_queue.values import ESTIMATOR_ROLE

Context = grpc.aio.ServicerContext[Any, Any]

RETRY_AFTER_S = 1.0
"""Hint where no prediction can be made: an instance may come."""

WINDOW_S = 300.0
"""Of GetOutcomes where none is asked for."""

BEHIND_ALL = 1 << 30
"""Priority band of a request without an SLO."""


class EstimatorService(estimator_pb2_grpc.EstimatorServicer):
    """`fresh_s`: age up to which a reading of the queue is used again."""

    def __init__(
        self,
        *,
        queue: Queue,
        clock: ServerClock,
        catalogue: Mapping[str, ModelSpec],
        shipped: ProfileSnapshot,
        metrics: EstimatorMetrics,
        fresh_s: float,
        leader: EstimatorShell,
    ) -> None:
        self._leader = leader
        self._queue = queue
        self._clock = clock
        self._catalogue = catalogue
        self._metrics = metrics
        self._reader = QueueReader(queue=queue, clock=clock, catalogue=catalogue, shipped=shipped, fresh_s=fresh_s)

    async def GetProfiles(  # noqa: N802 (gRPC names it)
        self, request: estimator_pb2.GetProfilesRequest, context: Context
    ) -> estimator_pb2.ProfileSnapshot:
        """The newest snapshot; version 0, the shipped one, where none was published."""
        return profile_wire.to_proto(await self._reader.newest())

    async def Predict(  # noqa: N802 (gRPC names it)
        self, request: estimator_pb2.PredictRequest, context: Context
    ) -> estimator_pb2.PredictResponse:
        """Raises NotFound, InvalidRequest, or Unavailable (NO_PREDICTION) where no instance of the model can be predicted."""
        with self._metrics.predict_seconds.time():
            spec, slo = _checked(request, self._catalogue)
            reading = await self._reader.now()
            group = _group_of_one(request, spec, slo, reading)
            joins = reading.open_groups.group_for(group, math.inf if slo is None else slo.seconds)
            found = reading.assessment.arriving(group, joins, reading.at_s)
            if found is None:
                raise Unavailable(
                    f"no instance of {spec.name} can be predicted now",
                    reason="NO_PREDICTION",
                    details={"model": spec.name, "retry_after_s": str(RETRY_AFTER_S)},
                )
            return estimator_pb2.PredictResponse(prediction=prediction_wire.to_proto(found, slo))

    async def Assess(  # noqa: N802 (gRPC names it)
        self, request: estimator_pb2.AssessRequest, context: Context
    ) -> estimator_pb2.Assessment:
        """Raises InvalidRequest, NotFound (UNKNOWN_INSTANCE)."""
        with self._metrics.assess_seconds.time():
            return assessment_message(request, await self._reader.now())

    async def GetOutcomes(  # noqa: N802 (gRPC names it)
        self, request: estimator_pb2.GetOutcomesRequest, context: Context
    ) -> estimator_pb2.Outcomes:
        """Raises InvalidRequest, and PreconditionFailed (NOT_LEADER) on a standby."""
        if not 0.0 <= request.window_s <= WINDOW_MAX_S:
            raise invalid_field("window_s", f"from 0 to {WINDOW_MAX_S:g}")
        outcomes = self._leader.outcomes
        if outcomes is None:
            raise await self._not_leader()
        return outcomes_message(outcomes.report(self._clock.now_s(), request.window_s or WINDOW_S))

    async def ImportProfiles(  # noqa: N802 (gRPC names it)
        self, request: estimator_pb2.ImportProfilesRequest, context: Context
    ) -> estimator_pb2.ImportProfilesResponse:
        """Raises InvalidRequest, PreconditionFailed (NOT_LEADER) on a standby, and Unavailable."""
        if self._leader.outcomes is None:
            raise await self._not_leader()
        # Bounded before it is read, which takes its time; version and time of a snapshot are not taken.
        told = request.profiles
        if max(len(told.hardware), len(told.workload), len(told.calibration)) > ROWS_MAX:
            raise invalid_field("profiles", f"at most {ROWS_MAX} rows of each kind")
        if max(len(told.length_model.features), len(told.length_model.scores)) > WEIGHTS_MAX:
            raise invalid_field("profiles", f"a length model of at most {WEIGHTS_MAX} features")
        profiles = estimator_pb2.ProfileSnapshot(
            hardware=told.hardware,
            workload=told.workload,
            calibration=told.calibration,
            length_model=told.length_model if told.HasField("length_model") else None,
        )
        try:
            rows = importable(profile_wire.from_proto(profiles))
        except ValueError as error:
            raise invalid_field("profiles", f"rows of sound figures: {error}") from error
        version = await self._leader.take_import(rows)
        return estimator_pb2.ImportProfilesResponse(version=version, hardware=len(rows.hardware), workload=len(rows.workload))

    async def _not_leader(self) -> PreconditionFailed:
        address = await self._queue.leader_address(ESTIMATOR_ROLE)
        return PreconditionFailed("this estimator is a standby", reason="NOT_LEADER", details={"leader": address})


def _group_of_one(request: estimator_pb2.PredictRequest, spec: ModelSpec, slo: Slo | None, reading: Reading) -> GroupView:
    """The request as a group that comes now, in the class that a gateway would accept it with."""
    slo_name = "" if slo is None else slo_class(slo)
    room_tokens = spec.context_tokens_max - request.prompt_tokens
    facts = LengthFacts(
        model=request.model,
        tenant=checked_tenant(request.tenant),
        application=request.application,
        prompt_tokens=request.prompt_tokens,
        output_tokens_asked=request.output_tokens_max if request.output_tokens_max < room_tokens else 0,
        hint_tokens=request.expected_output_tokens,
    )
    profiles = reading.snapshot
    curve = profiles.output_curve_for(request.model, slo_name, prompt_class(request.prompt_tokens))
    most = min(request.output_tokens_max, room_tokens)
    guess = profiles.length_model.guess(facts, curve.median_tokens, most)
    if slo is None:
        band = BEHIND_ALL
    elif slo.kind is SloKind.PRIORITY:
        band = slo.priority
    else:
        band = slo_band(reading.views)
    return GroupView(
        group_id="",
        model=request.model,
        slo_kind=SloKind.COMPLETION if slo is None else slo.kind,
        slo_class=slo_name,
        token_class=token_class(request.prompt_tokens, guess.class_tokens),
        waiting=1,
        waiting_prompt_tokens=request.prompt_tokens,
        first_deadline_s=math.inf if slo is None else slo.deadline_s(reading.at_s),
        output_tokens_max=float(most),
        band=band,
    )


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
    check_application(request.application)
    slo = request.slo
    return spec, checked_slo(slo.kind, slo.seconds, slo.priority) if request.HasField("slo") else None
