"""The Estimator service. A standby answers as well, all but outcomes: what else it needs is in the queue."""

from __future__ import annotations

from typing import Any

import grpc.aio
import structlog

from qlm.api.v1 import estimator_pb2, estimator_pb2_grpc
from qlm_core.profiles.importable_profiles import ROWS_MAX, importable
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.length_model import WEIGHTS_MAX
from qlm_core.vocabulary.errors import PreconditionFailed, invalid_field
from qlm_estimator.outcomes.report import WINDOW_MAX_S
from qlm_estimator.outcomes.wire import to_proto as outcomes_message
from qlm_estimator.shell import EstimatorShell
from qlm_process.queue.clock import ServerClock
from qlm_process.wire import profile as profile_wire
from qlm_queue.port import Queue
from qlm_queue.values import ESTIMATOR_ROLE

Context = grpc.aio.ServicerContext[Any, Any]

WINDOW_S = 300.0
"""Window of GetOutcomes where the caller names none."""


class EstimatorService(estimator_pb2_grpc.EstimatorServicer):
    def __init__(self, *, queue: Queue, clock: ServerClock, shipped: ProfileSnapshot, leader: EstimatorShell) -> None:
        self._leader = leader
        self._queue = queue
        self._clock = clock
        self._snapshot = shipped
        self._version = -1  # read last

    async def GetProfiles(  # noqa: N802 (gRPC names it)
        self, request: estimator_pb2.GetProfilesRequest, context: Context
    ) -> estimator_pb2.ProfileSnapshot:
        """The newest snapshot that was published and can be read; version 0, the shipped one, where none was. Raises Unavailable."""
        version, body = await self._queue.read_profiles()
        if body and version != self._version:
            self._version = version
            try:
                self._snapshot = profile_wire.from_body(body)
            except ValueError as error:
                structlog.get_logger().error("profiles_unreadable", version=version, error=str(error))
        return profile_wire.to_proto(self._snapshot)

    async def GetOutcomes(  # noqa: N802 (gRPC names it)
        self, request: estimator_pb2.GetOutcomesRequest, context: Context
    ) -> estimator_pb2.Outcomes:
        """Raises InvalidRequest, and PreconditionFailed (NOT_LEADER) on a standby."""
        if not 0.0 <= request.window_s <= WINDOW_MAX_S:
            raise invalid_field("window_s", f"from 0 to {WINDOW_MAX_S:g}", request.window_s)
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
        # Bounded before it is read, which takes its time.
        given = request.profiles
        if max(len(given.hardware), len(given.workload), len(given.calibration)) > ROWS_MAX:
            raise invalid_field("profiles", f"at most {ROWS_MAX} rows of each kind")
        if max(len(given.length_model.features), len(given.length_model.scores)) > WEIGHTS_MAX:
            raise invalid_field("profiles", f"a length model of at most {WEIGHTS_MAX} features")
        try:
            rows = importable(profile_wire.from_proto(given))
        except ValueError as error:
            raise invalid_field("profiles", f"rows of sound figures: {error}") from error
        version = await self._leader.take_import(rows)
        return estimator_pb2.ImportProfilesResponse(version=version, hardware=len(rows.hardware), workload=len(rows.workload))

    async def _not_leader(self) -> PreconditionFailed:
        address = await self._queue.leader_address(ESTIMATOR_ROLE)
        return PreconditionFailed("this estimator is a standby", reason="NOT_LEADER", details={"leader": address})
