"""The gRPC service `Planner`: the leader answers, a standby refuses with the leader's address."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import grpc
import structlog

from qlm.api.v1 import planner_pb2, planner_pb2_grpc
from qlm_core.vocabulary.errors import InvalidRequest, LeaseLost, NotFound, PreconditionFailed, Unavailable, invalid_field
from qlm_core.vocabulary.instance import instance_of
from qlm_planner.board.slot import EngineLoad
from qlm_planner.machine.events import InstanceAnnounced, LoadReported
from qlm_planner.overload.advice import Advice
from qlm_planner.shell.leadership import Leadership
from qlm_process.wire.instance import from_proto
from qlm_process.wire.running import TOKEN_MIN_S

WHY_BYTES_MAX = 256
INCARNATION = re.compile(r"[A-Za-z0-9_.-]{1,64}/[0-9]{1,19}")


class PlannerService(planner_pb2_grpc.PlannerServicer):
    """`leadership`: the present term, None on a standby. `leader_address`: reads the leader's address from the queue."""

    def __init__(self, leadership: Callable[[], Leadership | None], leader_address: Callable[[], Awaitable[str]]) -> None:
        self._leadership = leadership
        self._leader_address = leader_address

    async def RegisterInstance(  # noqa: N802
        self, request: planner_pb2.RegisterInstanceRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> planner_pb2.RegisterInstanceResponse:
        term = await self._leader()
        try:
            facts = from_proto(request.instance)
        except ValueError as error:
            raise InvalidRequest(str(error), details={"field": "instance", "rule": str(error)}) from error
        _check_incarnation("instance.incarnation", facts.incarnation)
        if instance_of(facts.incarnation) != facts.name:
            rule = "must be an incarnation of the instance"
            raise InvalidRequest(f"instance.incarnation: {rule}", details={"field": "instance.incarnation", "rule": rule})
        term.submit(InstanceAnnounced(facts=facts))
        return planner_pb2.RegisterInstanceResponse(plan_version=term.plan_version)

    async def Heartbeat(  # noqa: N802
        self, request: planner_pb2.HeartbeatRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> planner_pb2.HeartbeatResponse:
        term = await self._leader()
        _check_incarnation("incarnation", request.incarnation)
        term.submit(load_reported(request))
        if not term.knows(request.incarnation):  # the report still triggers an overview
            message = f"instance {request.incarnation} is not registered, or is not known yet"
            raise NotFound(message, reason="UNKNOWN_INSTANCE", details={"instance": request.incarnation})
        return planner_pb2.HeartbeatResponse(plan_version=term.plan_version)

    async def Replan(  # noqa: N802
        self, request: planner_pb2.ReplanRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> planner_pb2.ReplanResponse:
        term = await self._leader()
        if len(request.why.encode()) > WHY_BYTES_MAX:
            raise invalid_field("why", f"at most {WHY_BYTES_MAX} bytes")
        structlog.get_logger().info("replan_requested", why=request.why)
        try:
            version, moved = await term.replan()
        except LeaseLost:
            raise await self._not_leader() from None
        return planner_pb2.ReplanResponse(plan_version=version, groups_moved=moved)

    async def GetPlan(  # noqa: N802
        self, request: planner_pb2.GetPlanRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> planner_pb2.Plan:
        term = await self._leader()
        plan, latest = await term.plan(), term.advice.latest
        if latest is not None:
            plan.advice.CopyFrom(advice_to_proto(latest))
        return plan

    async def GetAdvice(  # noqa: N802
        self, request: planner_pb2.GetAdviceRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> planner_pb2.Advice:
        term = await self._leader()
        latest = term.advice.latest
        return planner_pb2.Advice() if latest is None else advice_to_proto(latest)

    async def _leader(self) -> Leadership:
        term = self._leadership()
        if term is None:
            raise await self._not_leader()
        return term

    async def _not_leader(self) -> PreconditionFailed:
        try:
            address = await self._leader_address()
        except Unavailable:
            address = ""
        return PreconditionFailed("this planner is a standby", reason="NOT_LEADER", details={"leader": address})


def load_reported(request: planner_pb2.HeartbeatRequest) -> LoadReported:
    """An agent's report for the machine."""
    load = request.load
    return LoadReported(
        incarnation=request.incarnation,
        active_model=load.swapping_to or load.active_model,
        warm_models=tuple(load.warm_models),
        batch=load.batch,
        engine=EngineLoad(
            kv_used_tokens=load.kv_used_tokens,
            kv_capacity_tokens=load.kv_capacity_tokens,
            prefill_left_tokens=load.prefill_left_tokens,
            token_s=load.token_s if TOKEN_MIN_S <= load.token_s < math.inf else 0.0,
        ),
    )


def _check_incarnation(field: str, incarnation: str) -> None:
    if INCARNATION.fullmatch(incarnation) is None:
        raise invalid_field(field, "<instance>/<fence>, the instance 1 to 64 bytes of [A-Za-z0-9_.-]")


def advice_to_proto(advice: Advice) -> planner_pb2.Advice:
    return planner_pb2.Advice(
        made_s=advice.made_s,
        line=advice.line,
        attainment=advice.attainment,
        late=advice.late,
        unserved=advice.unserved,
        misses=[planner_pb2.ExpectedMiss(**asdict(miss)) for miss in advice.misses],
        options=[planner_pb2.AdviceOption(**asdict(option)) for option in advice.options],
        model=advice.model,
        spare=advice.spare,
    )
