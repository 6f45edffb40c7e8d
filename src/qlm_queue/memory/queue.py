"""`MemoryQueue`: the queue in memory, for tests and the simulator. The port is its only specification (port.py).

It keeps nothing after the process, takes the time from `now_s`, and never waits but in blocking reads. One object is shared by all that use
the queue: `start` and `stop` do nothing.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from typing import Any, TypeVar, cast

from qlm_core.vocabulary.errors import Unavailable
from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.bounds import HeldBytes, held_bytes
from qlm_queue.damage import Damage, log_damage
from qlm_queue.event_entry import events_entry
from qlm_queue.memory import admission as memory_admission
from qlm_queue.memory import leases as memory_leases
from qlm_queue.memory import planning as memory_planning
from qlm_queue.memory import reading as memory_reading
from qlm_queue.memory import repair as memory_repair
from qlm_queue.memory import serving as memory_serving
from qlm_queue.memory.state import MemoryState, parse_id
from qlm_queue.operator_values import PAUSES_MAX, LivePage, too_many_pauses
from qlm_queue.overview import Overview, WaitsRecord, check_waits
from qlm_queue.values import (
    BATCH_MAX,
    Acceptance,
    AcceptReceipt,
    AppliedChunk,
    Attached,
    Bounds,
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

DIGEST_BYTES = 16
FRAMES_READ_MAX = 1_000
CONTROL_READ_MAX = 1_000
Answer = TypeVar("Answer", bound=Sized)
Twin = TypeVar("Twin")
Operation = TypeVar("Operation", bound=Callable[..., Any])


WAKING = frozenset(
    {
        *("accept", "attach", "cancel", "erase", "expire", "place", "regroup", "apply_plan", "reclaim", "shed"),
        *("pull", "unpull", "emit", "complete", "requeue", "report", "condemn"),
    }
)
"""Operations after which a blocked read may find something."""


def _guarded(operation: Operation) -> Operation:
    """An operation that meets damage repairs the queue and fails as where the server is away; where nothing is damaged it is a bug."""
    wakes = operation.__name__ in WAKING

    @functools.wraps(operation)
    async def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            answer = await operation(self, *args, **options)
            if wakes:
                await self._notify()
            return answer
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            found = memory_repair.repair(self.state, self._now_s(), mend=True)
            if not found:
                raise
            log_damage(found)
            raise Unavailable(f"the queue held a damaged record and was repaired: {error!r}") from error

    return cast(Operation, call)


def _all_guarded(queue: type[Twin]) -> type[Twin]:
    for name, operation in list(vars(queue).items()):
        if inspect.iscoroutinefunction(operation) and not name.startswith("_") and name != "repair":
            setattr(queue, name, _guarded(operation))
    return queue


@_all_guarded
class MemoryQueue:
    """See `port.Queue` for each operation. `state` is for tests, to move times."""

    def __init__(self, name: str, bounds: Bounds, now_s: Callable[[], float]) -> None:
        self._name = name
        self._now_s = now_s
        self.state = MemoryState(bounds)
        self._changed = asyncio.Condition()

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""

    async def server_time_s(self) -> float:
        return self._now_s()

    # Leases and instances ---------------------------------------------------------------------------------------------

    async def acquire_lease(self, role: str, nonce: str, ttl_s: float, address: str) -> Lease | None:
        return memory_leases.acquire(self.state, self._now_s(), role, nonce, ttl_s, address)

    async def renew_lease(self, lease: Lease, ttl_s: float, within_s: float | None = None) -> None:
        memory_leases.renew(self.state, self._now_s(), lease, ttl_s)

    async def release_lease(self, lease: Lease) -> None:
        memory_leases.release(self.state, self._now_s(), lease)

    async def leader_address(self, role: str) -> str:
        held = self.state.holder(role, self._now_s())
        return "" if held is None else held.address

    async def register(self, instance: str, nonce: str, body: bytes, ttl_s: float) -> tuple[str, Lease]:
        return memory_leases.register(self.state, self._now_s(), instance, nonce, body, ttl_s)

    async def describe(self, lease: Lease, body: bytes) -> None:
        memory_leases.describe(self.state, self._now_s(), lease, body)

    async def deregister(self, lease: Lease) -> None:
        memory_leases.deregister(self.state, self._now_s(), lease)

    async def forget_instance(self, lease: Lease, instance: str) -> bool:
        return memory_planning.forget_instance(self.state, self._now_s(), lease, instance)

    # Gateway ----------------------------------------------------------------------------------------------------------

    async def accept(self, acceptance: Acceptance) -> AcceptReceipt:
        if len(acceptance.digest) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(acceptance.digest)}")
        return memory_admission.accept(self.state, self._now_s(), acceptance)

    async def held(self) -> Sequence[HeldBytes]:
        state = self.state
        state.forget_old(self._now_s())
        return held_bytes(state.bounds, state.held_total, +state.held_by_tenant, +state.held_by_class)

    async def refusal(self) -> str:
        return ""

    async def loss(self) -> str:
        return ""

    async def attach(self, key: RequestKey, gateway: str, offset: int) -> Attached:
        return memory_admission.attach(self.state, self._now_s(), key, gateway, offset)

    async def cancel(self, key: RequestKey, result: bytes) -> RequestState:
        return memory_admission.cancel(self.state, self._now_s(), key, result)

    async def erase(self, key: RequestKey, result: bytes) -> RequestState:
        return memory_admission.erase(self.state, self._now_s(), key, result)

    async def expire(self, result: bytes) -> int:
        return memory_admission.expire(self.state, self._now_s(), result)

    async def read_frames(self, gateway: str, after: str, block_s: float) -> Sequence[StreamEntry]:
        start = parse_id(after)
        return await self._read(block_s, lambda: memory_reading.frames(self.state, self._now_s(), gateway, start, FRAMES_READ_MAX))

    # Planner ----------------------------------------------------------------------------------------------------------

    async def read_arrivals(self, block_s: float, count: int) -> Sequence[LiveRequest]:
        _check_count(count)
        return await self._read(block_s, lambda: memory_reading.arrivals(self.state, count))

    async def read_unplaced(self, after: str, count: int) -> Sequence[LiveRequest]:
        _check_count(count)
        return memory_reading.unplaced(self.state, after, count)

    async def place(self, lease: Lease, groups: Sequence[GroupPlacement], requests: Sequence[RequestPlacement]) -> Sequence[StepStatus]:
        _check_batch(groups)
        _check_batch(requests)
        return memory_planning.place(self.state, self._now_s(), lease, groups, requests)

    async def regroup(self, lease: Lease, source: str, into: GroupPlacement, requests: Sequence[WaitingRequest]) -> Sequence[StepStatus]:
        _check_batch(requests)
        return memory_planning.regroup(self.state, self._now_s(), lease, source, into, requests)

    async def apply_plan(self, lease: Lease, chunk: PlanChunk) -> AppliedChunk:
        return memory_planning.apply_plan(self.state, self._now_s(), lease, chunk)

    async def reclaim(self, lease: Lease, incarnation: str, failure: bytes) -> int:
        return memory_planning.reclaim(self.state, self._now_s(), lease, incarnation, failure)

    async def shed(self, lease: Lease, group_id: str, keep: int, count: int, oldest: bool, failure: bytes) -> int:
        _check_count(count)
        return memory_planning.shed(self.state, self._now_s(), lease, group_id, keep, count, oldest, failure)

    # Agent ------------------------------------------------------------------------------------------------------------

    async def pull(self, lease: Lease, model: str, budget: PullBudget) -> PullResult:
        _check_count(budget.requests_max)
        return memory_serving.pull(self.state, self._now_s(), lease, model, budget)

    async def owned(self, incarnation: str) -> Sequence[Pulled]:
        return [memory_serving.as_pulled(request) for _, request in sorted(self.state.running.get(incarnation, {}).items())]

    async def unpull(self, incarnation: str, requests: Sequence[Owned], behind_head: bool = False) -> Sequence[StepStatus]:
        _check_batch(requests)
        return memory_serving.unpull(self.state, self._now_s(), incarnation, requests, behind_head=behind_head)

    async def emit(self, incarnation: str, emissions: Sequence[Emission]) -> Sequence[StepStatus]:
        _check_batch(emissions)
        return memory_serving.emit(self.state, self._now_s(), incarnation, emissions)

    async def complete(self, incarnation: str, completions: Sequence[Completion]) -> Sequence[StepStatus]:
        _check_batch(completions)
        return memory_serving.complete(self.state, self._now_s(), incarnation, completions)

    async def requeue(self, incarnation: str, requests: Sequence[Owned], cause: RequeueCause, failure: bytes) -> Sequence[StepStatus]:
        _check_batch(requests)
        return memory_serving.requeue(self.state, self._now_s(), incarnation, requests, cause, failure)

    async def read_control(self, instance: str, after: str, block_s: float) -> Sequence[ControlEntry]:
        stream = self.state.control.get(instance)
        last_id = (0, 0) if stream is None else stream.last_id
        start = last_id if after == "$" else parse_id(after)
        found = await self._read(block_s, lambda: memory_reading.control(self.state, instance, start, CONTROL_READ_MAX))
        return [replace(entry, entry_id=entry_id) for entry_id, entry in found]

    # Operator ---------------------------------------------------------------------------------------------------------

    async def live_requests(self, after: str, count: int) -> LivePage:
        _check_count(count)
        return memory_reading.live_requests(self.state, after, count)

    async def pause(self, kind: PauseKind, name: str) -> bool:
        if (kind, name) in self.state.paused:
            return False
        if len(self.state.paused) >= PAUSES_MAX:
            raise too_many_pauses()
        self.state.paused[kind, name] = self._now_s()
        return True

    async def resume(self, kind: PauseKind, name: str) -> bool:
        return self.state.paused.pop((kind, name), None) is not None

    # Everyone ---------------------------------------------------------------------------------------------------------

    async def find(self, key: RequestKey) -> LiveRequest | TerminalRecord:
        found = memory_admission.find(self.state, self._now_s(), key)
        if found is None:
            raise memory_admission.not_found(key)
        return found

    async def requests_ahead(self, key: RequestKey) -> tuple[str, int]:
        return memory_reading.requests_ahead(self.state, key)

    async def waiting(self, group_id: str, after: int, count: int) -> Sequence[LiveRequest]:
        _check_count(count)
        return memory_reading.waiting(self.state, group_id, after, count)

    async def overview(self, group_ids: Sequence[str] | None = None) -> Overview:
        return memory_reading.overview(self.state, self._now_s(), group_ids)

    async def read_events(self, after: str, block_s: float, count: int) -> Sequence[StreamEntry]:
        start = self.state.events.last_id if after == "$" else parse_id(after)
        return await self._read(block_s, lambda: memory_reading.events(self.state, start, count))

    async def report(self, events: Sequence[bytes]) -> None:
        _check_batch(events)
        entry = events_entry(events)
        if entry:
            self.state.add_events(self._now_s(), entry)

    async def publish_waits(self, lease: Lease, body: bytes) -> None:
        check_waits(body)
        self.state.check(lease, self._now_s())
        self.state.waits = body

    async def read_waits(self) -> WaitsRecord:
        state = self.state
        return WaitsRecord(
            body=state.waits, accepted_count=state.accepted_count, live=len(state.requests), pauses=memory_reading.pauses(state)
        )

    async def publish_profiles(self, lease: Lease, version: int, body: bytes) -> None:
        self.state.check(lease, self._now_s())
        self.state.profiles = (version, body)

    async def read_profiles(self) -> tuple[int, bytes]:
        return self.state.profiles

    async def repair(self, mend: bool) -> Sequence[Damage]:
        found = memory_repair.repair(self.state, self._now_s(), mend=mend)
        await self._notify()
        return found

    async def condemn(self, queue_ids: Sequence[str]) -> int:
        _check_batch(queue_ids)
        return memory_admission.condemn(self.state, self._now_s(), queue_ids)

    # Blocking reads ---------------------------------------------------------------------------------------------------

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _read(self, block_s: float, read: Callable[[], Answer]) -> Answer:
        """Returns the result of `read`, at once or within `block_s` seconds; it is empty after them."""
        found = read()
        if len(found) > 0 or block_s <= 0:
            return found
        try:
            async with asyncio.timeout(block_s), self._changed:
                while len(found) == 0:  # the timeout bounds it
                    await self._changed.wait()
                    found = read()
        except TimeoutError:
            return found
        return found


def _check_batch(items: Sized) -> None:
    _check_count(len(items))


def _check_count(count: int) -> None:
    if count > BATCH_MAX:
        raise ValueError(f"{count} items in one call: at most {BATCH_MAX}")
