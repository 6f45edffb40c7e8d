"""The gRPC `Agent` service: it only calls the shell."""

from __future__ import annotations

import math
from typing import Any, Protocol

import grpc.aio

from qlm.api.v1 import agent_pb2, agent_pb2_grpc, instance_pb2
from qlm_agent.engines.port import Tier
from qlm_core.errors import invalid_field
from qlm_core.instance import InstanceFacts
from qlm_process.wire.instance import to_proto

DRAIN_FINISH_MAX_S = 3600.0
Context = grpc.aio.ServicerContext[Any, Any]


class AgentControl(Protocol):
    """The shell's operations for the service."""

    @property
    def facts(self) -> InstanceFacts: ...

    def load(self) -> instance_pb2.InstanceLoad: ...

    async def drain(self, finish_s: float) -> tuple[int, int]:
        """Drains; returns the counts of finished and given back runs."""

    async def move_model(self, model: str, tier: Tier) -> float:
        """Moves a model; returns the seconds it took. Raises NotFound and PreconditionFailed."""


class AgentService(agent_pb2_grpc.AgentServicer):
    """See agent.proto."""

    def __init__(self, agent: AgentControl) -> None:
        self._agent = agent

    async def GetStatus(  # noqa: N802
        self, request: agent_pb2.GetAgentStatusRequest, context: Context
    ) -> agent_pb2.GetAgentStatusResponse:
        return agent_pb2.GetAgentStatusResponse(instance=to_proto(self._agent.facts), load=self._agent.load())

    async def Drain(self, request: agent_pb2.DrainRequest, context: Context) -> agent_pb2.DrainResponse:  # noqa: N802
        if not (math.isfinite(request.finish_s) and 0.0 <= request.finish_s <= DRAIN_FINISH_MAX_S):
            raise invalid_field("finish_s", f"from 0 to {DRAIN_FINISH_MAX_S:.0f}")
        finished, given_back = await self._agent.drain(request.finish_s)
        return agent_pb2.DrainResponse(finished=finished, requeued=given_back)

    async def LoadModel(  # noqa: N802
        self, request: agent_pb2.LoadModelRequest, context: Context
    ) -> agent_pb2.LoadModelResponse:
        return agent_pb2.LoadModelResponse(took_s=await self._agent.move_model(request.model, Tier.WARM))

    async def UnloadModel(  # noqa: N802
        self, request: agent_pb2.UnloadModelRequest, context: Context
    ) -> agent_pb2.UnloadModelResponse:
        await self._agent.move_model(request.model, Tier.COLD)
        return agent_pb2.UnloadModelResponse()
