"""Polls a whole cluster over its public gRPC APIs: gateways, the leading planner and estimator, and every agent.

Each call has a deadline, and a part that does not answer is a part of the picture: it is shown with the reason and what was last known
of it. Leaders and addresses of agents are those that a gateway named last, so all else is still seen while gateways are away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from qlm.api.v1 import agent_pb2, estimator_pb2, gateway_pb2, planner_pb2
from qlm.api.v1.agent_pb2_grpc import AgentStub
from qlm.api.v1.estimator_pb2_grpc import EstimatorStub
from qlm.api.v1.gateway_pb2_grpc import GatewayStub
from qlm.api.v1.planner_pb2_grpc import PlannerStub
from qlm.credentials import Credentials, credentials_of
from qlm.link import RECONNECTING
from qlm.wire_errors import from_rpc_error
from qlm_core.vocabulary.errors import QlmError
from qlm_process.cluster.view import (
    UNASSIGNED,
    AgentView,
    ClusterView,
    GroupView,
    InstanceView,
    OutcomesView,
    PartView,
    agent_view,
    group_view,
    outcomes_view,
)

CALL_TIMEOUT_S = 1.0
MESSAGE_BYTES_MAX = 64 << 20
INSTANCES_MAX = 1_000
"""Most instances that are polled."""

Answer = TypeVar("Answer")
Metadata = Sequence[tuple[str, str]]
StatusOf = Callable[[Metadata], Awaitable[gateway_pb2.QueueStatusResponse]]
"""Answers QueueStatus for calls with this metadata. Raises QlmError."""


class ClusterObserver:
    """`gateways`: "host:port" of each. Close it, or use it as an asynchronous context manager."""

    def __init__(
        self,
        gateways: Sequence[str],
        *,
        window_s: float = 0.0,
        call_timeout_s: float = CALL_TIMEOUT_S,
        credentials: Credentials | None = None,
        own_status: StatusOf | None = None,
    ) -> None:
        """`window_s`: seconds that outcomes are for; 0: the estimator's default. `credentials`: by default the environment's.
        `own_status`: of an observer inside a gateway, which then is the one of `gateways`, by any name, and is not called over gRPC."""
        self._credentials = credentials or credentials_of()
        self._metadata: Metadata = self._credentials.metadata
        self._own_status = own_status
        self._gateways = list(gateways)
        self._window_s = window_s
        self._timeout_s = call_timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._planner = ""
        self._estimator = ""
        self._agents: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Safe twice."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    async def poll(self, metadata: Metadata | None = None) -> ClusterView:
        """The cluster now. Raises nothing for parts that are away. `metadata`: of this poll's calls, by default the credentials'. One poll
        at a time."""
        self._metadata = self._credentials.metadata if metadata is None else metadata
        gateway_parts, status = await self._ask_gateways()
        if status is not None:
            self._remember(status)
        (planner, plan), (estimator, outcomes), agents = await asyncio.gather(
            self._ask("planner", self._planner, self._plan), self._ask("estimator", self._estimator, self._outcomes), self._ask_agents()
        )
        await self._forget_channels()
        return ClusterView(
            at_s=plan.made_s if plan is not None else time.time(),
            queue=status.queue if status is not None else "",
            live=status.live if status is not None else None,
            unplaced=status.unplaced if status is not None else None,
            running=status.running if status is not None else None,
            plan_version=plan.version if plan is not None else None,
            advice=plan.advice.line if plan is not None else "",
            parts=(*gateway_parts, planner, estimator),
            instances=_instances(status, plan, agents),
            unassigned=_groups(UNASSIGNED, status, plan),
            outcomes=outcomes,
        )

    def _remember(self, status: gateway_pb2.QueueStatusResponse) -> None:
        """A process that is away has no address: the last one is kept, so that it is shown as away."""
        self._planner = status.planner or self._planner
        self._estimator = status.estimator or self._estimator
        names = [queue.instance for queue in status.virtual_queues if queue.instance != UNASSIGNED][:INSTANCES_MAX]
        known = {queue.instance: queue.address for queue in status.virtual_queues}
        self._agents = {name: known[name] or self._agents.get(name, "") for name in names}

    async def _ask_gateways(self) -> tuple[list[PartView], gateway_pb2.QueueStatusResponse | None]:
        """Calls all of them, so that each is seen; the first answer counts."""
        answers = await asyncio.gather(*(self._ask("gateway", address, self._status) for address in self._gateways))
        return [part for part, _ in answers], next((answer for _, answer in answers if answer is not None), None)

    async def _ask_agents(self) -> dict[str, tuple[PartView, AgentView | None]]:
        names = list(self._agents)
        answers = await asyncio.gather(*(self._ask(name, self._agents[name], self._agent) for name in names))
        return dict(zip(names, answers, strict=True))

    async def _ask(self, name: str, address: str, call: Callable[[str], Awaitable[Answer]]) -> tuple[PartView, Answer | None]:
        if not address:
            return PartView(name=name, address="", problem="not known"), None
        try:
            return PartView(name=name, address=address), await call(address)
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
        except QlmError as failure:
            error = failure
        self._follow(name, error)
        return PartView(name=name, address=address, problem=_in_short(error)), None

    def _follow(self, name: str, error: QlmError) -> None:
        """A standby names the leader, which is called next."""
        leader = error.details.get("leader", "") if error.reason == "NOT_LEADER" else ""
        if leader and name == "planner":
            self._planner = leader
        elif leader and name == "estimator":
            self._estimator = leader

    async def _status(self, address: str) -> gateway_pb2.QueueStatusResponse:
        if self._own_status is not None:
            return await self._own_status(self._metadata)
        answer: gateway_pb2.QueueStatusResponse = await self._call(GatewayStub, "QueueStatus", address, gateway_pb2.QueueStatusRequest())
        return answer

    async def _plan(self, address: str) -> planner_pb2.Plan:
        plan: planner_pb2.Plan = await self._call(PlannerStub, "GetPlan", address, planner_pb2.GetPlanRequest())
        return plan

    async def _outcomes(self, address: str) -> OutcomesView:
        request = estimator_pb2.GetOutcomesRequest(window_s=self._window_s)
        return outcomes_view(await self._call(EstimatorStub, "GetOutcomes", address, request))

    async def _agent(self, address: str) -> AgentView:
        return agent_view(await self._call(AgentStub, "GetStatus", address, agent_pb2.GetAgentStatusRequest()))

    async def _call(self, stub: Callable[[grpc.aio.Channel], Any], method: str, address: str, request: Message) -> Any:
        """Raises RpcError."""
        return await getattr(stub(self._channel(address)), method)(request, timeout=self._timeout_s, metadata=self._metadata)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._credentials.aio_channel(address, _OPTIONS)
        return self._channels[address]

    async def _forget_channels(self) -> None:
        """Those of processes that are somewhere else now."""
        wanted = {*self._gateways, self._planner, self._estimator, *self._agents.values()}
        for address in [address for address in self._channels if address not in wanted]:
            await self._channels.pop(address).close(None)


def _instances(
    status: gateway_pb2.QueueStatusResponse | None, plan: planner_pb2.Plan | None, agents: dict[str, tuple[PartView, AgentView | None]]
) -> tuple[InstanceView, ...]:
    queues = {queue.instance: queue for queue in status.virtual_queues} if status is not None else {}
    return tuple(
        InstanceView(
            name=name,
            part=part,
            alive=queues[name].alive if name in queues else None,
            owned=queues[name].running if name in queues else None,
            active_model=agent.active_model if agent is not None else queues[name].active_model if name in queues else "",
            agent=agent,
            groups=_groups(name, status, plan),
        )
        for name, (part, agent) in sorted(agents.items())
    )


def _groups(name: str, status: gateway_pb2.QueueStatusResponse | None, plan: planner_pb2.Plan | None) -> tuple[GroupView, ...]:
    """The order is the queue's own where a gateway reports it, predictions are the planner's."""
    planned = {group.group_id: group for queue in plan.queues for group in queue.groups} if plan is not None else {}
    late = {miss.group_id: miss.late for miss in plan.advice.misses} if plan is not None else {}
    if status is not None:
        found = [queue for queue in status.virtual_queues if queue.instance == name]
        return tuple(
            group_view(group, planned.get(group.group_id), late.get(group.group_id, 0.0)) for queue in found for group in queue.groups
        )
    if plan is not None:
        return tuple(group_view(group, group) for queue in plan.queues if queue.instance == name for group in queue.groups)
    return ()


def _in_short(error: QlmError) -> str:
    """Why a part did not answer, in a word or two."""
    transport = error.details.get("transport", "")
    return {"UNAVAILABLE": "down", "DEADLINE_EXCEEDED": "no answer"}.get(transport, error.reason)


_OPTIONS = (("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), *RECONNECTING)
