"""The gRPC `Agent` service: it only calls the shell."""

from __future__ import annotations

import math
from typing import Any

import grpc.aio

from qlm.api.v1 import agent_pb2, agent_pb2_grpc
from qlm_agent.engines.port import Tier
from qlm_agent.shell.shell import AgentShell
from qlm_core.vocabulary.errors import invalid_field
from qlm_process.wire.instance import to_proto

DRAIN_FINISH_MAX_S = 3600.0
Context = grpc.aio.ServicerContext[Any, Any]


class AgentService(agent_pb2_grpc.AgentServicer):
    """See agent.proto."""

    def __init__(self, agent: AgentShell) -> None:
        self._agent = agent

    async def GetStatus(  # noqa: N802
        self, request: agent_pb2.GetAgentStatusRequest, context: Context
    ) -> agent_pb2.GetAgentStatusResponse:
        return agent_pb2.GetAgentStatusResponse(instance=to_proto(self._agent.facts), load=self._agent.load())

    async def Drain(self, request: agent_pb2.DrainRequest, context: Context) -> agent_pb2.DrainResponse:  # noqa: N802
        if not (math.isfinite(request.finish_s) and 0.0 <= request.finish_s <= DRAIN_FINISH_MAX_S):
            raise invalid_field("finish_s", f"from 0 to {DRAIN_FINISH_MAX_S:.0f}", request.finish_s)
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
