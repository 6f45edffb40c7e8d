"""The queue's port as one process has it: every operation is a call over the network."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.damage import Damage
from qlm_queue.held_bytes import HeldBytes
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.operator_values import LivePage
from qlm_queue.overview import Overview, WaitsRecord
from qlm_queue.values import (
    Acceptance,
    AcceptReceipt,
    AppliedChunk,
    Attached,
    Completion,
    ControlEntry,
    Emission,
    GroupPlacement,
    Lease,
    LiveRequest,
    Owned,
    PlanChunk,
    PullBudget,
    Pulled,
    PullResult,
    RequestPlacement,
    RequeueCause,
    StepStatus,
    StreamEntry,
    TerminalRecord,
    WaitingRequest,
)
from qlm_sim.world.network import Command, Network
from qlm_sim.world.process import Process

P = ParamSpec("P")
Answer = TypeVar("Answer")


class QueueLink:
    """See `qlm_queue.port.Queue`. A new operation of the port is missing here until it is added: mypy reports it."""

    def __init__(self, name: str, process: Process, network: Network) -> None:
        self._name = name
        self._process = process
        self._network = network

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""

    async def _call(
        self, operation: Callable[Concatenate[MemoryQueue, P], Coroutine[Any, Any, Answer]], *args: P.args, **kwargs: P.kwargs
    ) -> Answer:
        """`operation`: the twin's method; the call uses that of the server's own object."""
        assert not kwargs, "all arguments are given by position"
        answer: Answer = await self._network.call(self._process, Command(name=operation.__name__, args=args))
        return answer

    async def server_time_s(self) -> float:
        return await self._call(MemoryQueue.server_time_s)

    async def acquire_lease(self, role: str, nonce: str, ttl_s: float, address: str) -> Lease | None:
        return await self._call(MemoryQueue.acquire_lease, role, nonce, ttl_s, address)

    async def renew_lease(self, lease: Lease, ttl_s: float, within_s: float | None = None) -> None:
        await self._network.call(self._process, Command(name="renew_lease", args=(lease, ttl_s)), within_s)

    async def release_lease(self, lease: Lease) -> None:
        await self._call(MemoryQueue.release_lease, lease)

    async def leader_address(self, role: str) -> str:
        return await self._call(MemoryQueue.leader_address, role)

    async def register(self, instance: str, nonce: str, body: bytes, ttl_s: float) -> tuple[str, Lease]:
        return await self._call(MemoryQueue.register, instance, nonce, body, ttl_s)

    async def describe(self, lease: Lease, body: bytes) -> None:
        await self._call(MemoryQueue.describe, lease, body)

    async def deregister(self, lease: Lease) -> None:
        await self._call(MemoryQueue.deregister, lease)

    async def forget_instance(self, lease: Lease, instance: str) -> bool:
        return await self._call(MemoryQueue.forget_instance, lease, instance)

    async def accept(self, acceptance: Acceptance) -> AcceptReceipt:
        return await self._call(MemoryQueue.accept, acceptance)

    async def held(self) -> Sequence[HeldBytes]:
        return await self._call(MemoryQueue.held)

    async def refusal(self) -> str:
        return await self._call(MemoryQueue.refusal)

    async def loss(self) -> str:
        return await self._call(MemoryQueue.loss)

    async def attach(self, key: RequestKey, gateway: str, offset: int) -> Attached:
        return await self._call(MemoryQueue.attach, key, gateway, offset)

    async def cancel(self, key: RequestKey, result: bytes) -> RequestState:
        return await self._call(MemoryQueue.cancel, key, result)

    async def erase(self, key: RequestKey, result: bytes) -> RequestState:
        return await self._call(MemoryQueue.erase, key, result)

    async def expire(self, result: bytes) -> int:
        return await self._call(MemoryQueue.expire, result)

    async def read_frames(self, gateway: str, after: str, block_s: float) -> Sequence[StreamEntry]:
        return await self._call(MemoryQueue.read_frames, gateway, after, block_s)

    async def read_arrivals(self, block_s: float, count: int) -> Sequence[LiveRequest]:
        return await self._call(MemoryQueue.read_arrivals, block_s, count)

    async def read_unplaced(self, after: str, count: int) -> Sequence[LiveRequest]:
        return await self._call(MemoryQueue.read_unplaced, after, count)

    async def place(self, lease: Lease, groups: Sequence[GroupPlacement], requests: Sequence[RequestPlacement]) -> Sequence[StepStatus]:
        return await self._call(MemoryQueue.place, lease, groups, requests)

    async def regroup(self, lease: Lease, source: str, into: GroupPlacement, requests: Sequence[WaitingRequest]) -> Sequence[StepStatus]:
        return await self._call(MemoryQueue.regroup, lease, source, into, requests)

    async def apply_plan(self, lease: Lease, chunk: PlanChunk) -> AppliedChunk:
        return await self._call(MemoryQueue.apply_plan, lease, chunk)

    async def reclaim(self, lease: Lease, incarnation: str, failure: bytes) -> int:
        return await self._call(MemoryQueue.reclaim, lease, incarnation, failure)

    async def shed(self, lease: Lease, group_id: str, keep: int, count: int, oldest: bool, failure: bytes) -> int:
        return await self._call(MemoryQueue.shed, lease, group_id, keep, count, oldest, failure)

    async def pull(self, lease: Lease, model: str, budget: PullBudget) -> PullResult:
        return await self._call(MemoryQueue.pull, lease, model, budget)

    async def owned(self, incarnation: str) -> Sequence[Pulled]:
        return await self._call(MemoryQueue.owned, incarnation)

    async def unpull(self, incarnation: str, requests: Sequence[Owned], behind_head: bool = False) -> Sequence[StepStatus]:
        return await self._call(MemoryQueue.unpull, incarnation, requests, behind_head)

    async def emit(self, incarnation: str, emissions: Sequence[Emission]) -> Sequence[StepStatus]:
        return await self._call(MemoryQueue.emit, incarnation, emissions)

    async def complete(self, incarnation: str, completions: Sequence[Completion]) -> Sequence[StepStatus]:
        return await self._call(MemoryQueue.complete, incarnation, completions)

    async def requeue(self, incarnation: str, requests: Sequence[Owned], cause: RequeueCause, failure: bytes) -> Sequence[StepStatus]:
        return await self._call(MemoryQueue.requeue, incarnation, requests, cause, failure)

    async def read_control(self, instance: str, after: str, block_s: float) -> Sequence[ControlEntry]:
        return await self._call(MemoryQueue.read_control, instance, after, block_s)

    async def live_requests(self, after: str, count: int) -> LivePage:
        return await self._call(MemoryQueue.live_requests, after, count)

    async def pause(self, kind: PauseKind, name: str) -> bool:
        return await self._call(MemoryQueue.pause, kind, name)

    async def resume(self, kind: PauseKind, name: str) -> bool:
        return await self._call(MemoryQueue.resume, kind, name)

    async def find(self, key: RequestKey) -> LiveRequest | TerminalRecord:
        return await self._call(MemoryQueue.find, key)

    async def requests_ahead(self, key: RequestKey) -> tuple[str, int]:
        return await self._call(MemoryQueue.requests_ahead, key)

    async def waiting(self, group_id: str, after: int, count: int) -> Sequence[LiveRequest]:
        return await self._call(MemoryQueue.waiting, group_id, after, count)

    async def overview(self, group_ids: Sequence[str] | None = None) -> Overview:
        return await self._call(MemoryQueue.overview, group_ids)

    async def read_events(self, after: str, block_s: float, count: int) -> Sequence[StreamEntry]:
        return await self._call(MemoryQueue.read_events, after, block_s, count)

    async def report(self, events: Sequence[bytes]) -> None:
        await self._call(MemoryQueue.report, events)

    async def repair(self, mend: bool) -> Sequence[Damage]:
        return await self._call(MemoryQueue.repair, mend)

    async def condemn(self, queue_ids: Sequence[str]) -> int:
        return await self._call(MemoryQueue.condemn, queue_ids)

    async def publish_waits(self, lease: Lease, body: bytes) -> None:
        await self._call(MemoryQueue.publish_waits, lease, body)

    async def read_waits(self) -> WaitsRecord:
        return await self._call(MemoryQueue.read_waits)

    async def publish_profiles(self, lease: Lease, version: int, body: bytes) -> None:
        await self._call(MemoryQueue.publish_profiles, lease, version, body)

    async def read_profiles(self) -> tuple[int, bytes]:
        return await self._call(MemoryQueue.read_profiles)
