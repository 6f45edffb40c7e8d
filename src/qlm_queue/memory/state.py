"""State of a `MemoryQueue`: plain values in dicts, and the streams."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from qlm_core.vocabulary.errors import LeaseLost
from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.bounds import RECORD_BYTES
from qlm_queue.values import Bounds, ControlEntry, ControlKind, Lease, LiveRequest, TerminalRecord

StreamId = tuple[int, int]
Payload = TypeVar("Payload")


def parse_id(entry_id: str) -> StreamId:
    """An entry id "<ms>-<seq>" or "<ms>" as numbers, which order as the entries do."""
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


@dataclass(slots=True, kw_only=True)
class StoredRequest:
    """A live request. `read`: a planner has read it from the global queue. Times are 0 where it did not happen."""

    queue_id: str
    key: RequestKey
    number: int
    accepted_s: float
    digest: bytes
    body: bytes
    model: str
    slo_class: str
    prompt_tokens: int
    gateway: str
    expiry_s: float | None
    state: RequestState = RequestState.ACCEPTED
    group_id: str = ""
    incarnation: str = ""
    attempt: int = 0
    failed_attempts: int = 0
    read: bool = False
    text: bool = False
    placed_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    progress: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)

    @property
    def held_bytes(self) -> int:
        return RECORD_BYTES + len(self.body) + len(self.progress) + len(self.logprobs)

    @property
    def produced_tokens(self) -> int:
        """Output tokens that progress stands for: 4 bytes each (of text, an estimate)."""
        return (len(self.progress) + 3) // 4

    def logprobs_from(self, offset: int) -> bytes:
        """Log probabilities of the tokens from byte `offset` of progress on: equally many bytes each."""
        return bytes(self.logprobs[offset * len(self.logprobs) // len(self.progress) :]) if self.logprobs else b""

    def as_live(self) -> LiveRequest:
        return LiveRequest(
            queue_id=self.queue_id,
            key=self.key,
            acceptance_number=self.number,
            accepted_s=self.accepted_s,
            state=self.state,
            group_id=self.group_id,
            incarnation=self.incarnation,
            attempt=self.attempt,
            failed_attempts=self.failed_attempts,
            gateway=self.gateway,
            body=self.body,
            text=self.text,
            placed_s=self.placed_s,
            started_s=self.started_s,
            first_token_s=self.first_token_s,
        )


@dataclass(slots=True, kw_only=True)
class StoredGroup:
    """A group with live requests. `members`: acceptance numbers of the waiting ones, sorted."""

    group_id: str
    first_deadline_s: float
    meta: Mapping[str, str]
    last_deadline_s: float = -math.inf
    instance: str = ""
    last_instance: str = ""
    members: list[int] = field(default_factory=list)
    live: int = 0
    waiting_prompt_tokens: int = 0
    slo_least_s: float = math.inf

    @property
    def model(self) -> str:
        return self.meta.get("model", "")


@dataclass(slots=True, kw_only=True)
class StoredQueue:
    """A virtual queue."""

    version: int = 0
    group_ids: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class StoredInstance:
    incarnation: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLease:
    token: str
    address: str
    expires_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTerminal:
    """`incarnation`: the agent that ended the request, "" if none did. `held_bytes`: counted for it in its window."""

    record: TerminalRecord
    slo_class: str
    held_bytes: int
    incarnation: str
    progress: bytes
    expires_s: float


class MemoryStream(Generic[Payload]):
    """A stream that keeps its last `length_max` entries."""

    def __init__(self, length_max: int) -> None:
        self._length_max = length_max
        self._ids: list[StreamId] = []
        self._payloads: list[Payload] = []
        self.last_id: StreamId = (0, 0)
        self.last_added_s = 0.0

    def add(self, now_s: float, payload: Payload) -> None:
        milliseconds = int(now_s * 1000)
        self.last_id = (milliseconds, 0) if milliseconds > self.last_id[0] else (self.last_id[0], self.last_id[1] + 1)
        self.last_added_s = now_s
        self._ids.append(self.last_id)
        self._payloads.append(payload)
        if len(self._ids) >= 2 * self._length_max:  # in big steps: cutting a list's head costs its length
            del self._ids[: -self._length_max]
            del self._payloads[: -self._length_max]

    def after(self, entry_id: StreamId, count: int) -> list[tuple[str, Payload]]:
        first = max(bisect_right(self._ids, entry_id), len(self._ids) - self._length_max)
        return [(f"{i[0]}-{i[1]}", payload) for i, payload in zip(self._ids[first : first + count], self._payloads[first:], strict=False)]

    def payloads(self) -> tuple[Payload, ...]:
        return tuple(self._payloads[-self._length_max :])


class MemoryState:
    """All of one queue. `written`: (kind, owner) of the streams that commands added to, until somebody clears it."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.accepted_count = 0
        self.plan_version = 0
        self.last_queue_id: StreamId = (0, 0)
        self.requests: dict[str, StoredRequest] = {}  # by queue id, in order
        self.by_key: dict[RequestKey, StoredRequest] = {}
        self.by_number: dict[int, StoredRequest] = {}
        self.unplaced: dict[str, StoredRequest] = {}  # ACCEPTED ones by queue id
        self.unread: deque[str] = deque()
        self.expiries: list[tuple[float, int]] = []  # (expiry, acceptance number), sorted
        self.live_by_tenant: Counter[str] = Counter()
        self.live_by_class: Counter[str] = Counter()
        self.held_total = 0  # bytes
        self.held_by_tenant: Counter[str] = Counter()
        self.held_by_class: Counter[str] = Counter()
        self.terminals: dict[RequestKey, StoredTerminal] = {}
        self.groups: dict[str, StoredGroup] = {}
        self.queues: dict[str, StoredQueue] = {UNASSIGNED: StoredQueue()}
        self.instances: dict[str, StoredInstance] = {}
        self.running: dict[str, dict[int, StoredRequest]] = {}  # incarnation -> what it owns; an empty one is kept until it is forgotten
        self.leases: dict[str, StoredLease] = {}
        self.fences: Counter[str] = Counter()
        self.frames: dict[str, MemoryStream[bytes]] = {}
        self.control: dict[str, MemoryStream[ControlEntry]] = {}
        self.events: MemoryStream[bytes] = MemoryStream(bounds.events_max)
        self.profiles: tuple[int, bytes] = (0, b"")
        self.waits = b""
        self.written: set[tuple[str, str]] = set()
        self.damage_count = 0
        self.paused: dict[tuple[PauseKind, str], float] = {}  # since when

    def next_queue_id(self, now_s: float) -> str:
        milliseconds = int(now_s * 1000)
        last = self.last_queue_id
        self.last_queue_id = (milliseconds, 0) if milliseconds > last[0] else (last[0], last[1] + 1)
        return f"{self.last_queue_id[0]}-{self.last_queue_id[1]}"

    def unplaced_in_order(self) -> list[StoredRequest]:
        return sorted(self.unplaced.values(), key=lambda request: request.number)

    def add_expiry(self, request: StoredRequest) -> None:
        if request.expiry_s is not None:
            insort(self.expiries, (request.expiry_s, request.number))

    def remove_expiry(self, request: StoredRequest) -> None:
        if request.expiry_s is not None:
            del self.expiries[bisect_left(self.expiries, (request.expiry_s, request.number))]

    def live(self, key: RequestKey, queue_id: str) -> StoredRequest | None:
        """The request of this key, if it is the one of this queue id and has not ended."""
        request = self.by_key.get(key)
        return request if request is not None and request.queue_id == queue_id else None

    def count_bytes(self, tenant: str, slo_class: str, by: int) -> None:
        """Bytes that a request or its result holds, by what the bounds name."""
        self.held_total += by
        self.held_by_tenant[tenant] += by
        self.held_by_class[slo_class] += by

    def end(self, request: StoredRequest, record: TerminalRecord, by: str, result_bytes: int, now_s: float) -> None:
        """Keeps the end of a request, which is deleted, for its window, and forgets those whose window is over. `result_bytes`: of the
        Result as it was given."""
        self.forget_old(now_s)
        self.forget(request.key)
        held = RECORD_BYTES + result_bytes + len(request.progress) + len(request.logprobs)
        self.count_bytes(request.key.tenant, request.slo_class, held)
        self.terminals[request.key] = StoredTerminal(
            record=record,
            slo_class=request.slo_class,
            held_bytes=held,
            incarnation=by,
            progress=bytes(request.progress),
            expires_s=now_s + self.bounds.result_ttl_s,
        )

    def forget_old(self, now_s: float) -> None:
        """Forgets the ends whose window is over."""
        while self.terminals and next(iter(self.terminals.values())).expires_s <= now_s:  # all windows are equally long
            self.forget(next(iter(self.terminals)))

    def forget(self, key: RequestKey) -> None:
        """Forgets an end, if there is one."""
        stored = self.terminals.pop(key, None)
        if stored is not None:
            self.count_bytes(key.tenant, stored.slo_class, -stored.held_bytes)

    def terminal(self, key: RequestKey, now_s: float) -> TerminalRecord | None:
        """The end of a request, within its window."""
        stored = self.terminals.get(key)
        if stored is not None and stored.expires_s <= now_s:
            self.forget(key)
            return None
        return None if stored is None else stored.record

    def next_deadline_s(self, group: StoredGroup) -> float:
        """No deadline of the requests that wait in a group is before it."""
        if not group.members or group.slo_least_s == math.inf:
            return group.first_deadline_s
        return max(group.first_deadline_s, self.by_number[group.members[0]].accepted_s + group.slo_least_s)

    def holder(self, role: str, now_s: float) -> StoredLease | None:
        """The live lease of a role."""
        lease = self.leases.get(role)
        if lease is not None and lease.expires_s <= now_s:
            del self.leases[role]
            return None
        return lease

    def check(self, lease: Lease, now_s: float) -> None:
        """Raises LeaseLost unless this very lease holds."""
        held = self.holder(lease.role, now_s)
        if held is None or held.token != lease.token:
            raise LeaseLost(f"the lease of {lease.role} expired or belongs to another")

    def frames_of(self, gateway: str, now_s: float) -> MemoryStream[bytes] | None:
        """The frames kept for a gateway; the stream of a gateway to which nothing is sent for `frames_ttl_s` goes."""
        stream = self.frames.get(gateway)
        if stream is not None and stream.last_added_s + self.bounds.frames_ttl_s <= now_s:
            del self.frames[gateway]
            return None
        return stream

    def send(self, now_s: float, instance: str, kind: ControlKind, queue_id: str = "", attempt: int = 0) -> None:
        """Puts a message on the control stream of an instance; the unassigned queue has no agent to hear it."""
        if instance == UNASSIGNED:
            return
        stream = self.control.setdefault(instance, MemoryStream(self.bounds.control_max))
        stream.add(now_s, ControlEntry(entry_id="", kind=kind, queue_id=queue_id, attempt=attempt))
        self.written.add(("control", instance))

    def add_events(self, now_s: float, entry: bytes) -> None:
        self.events.add(now_s, entry)
        self.written.add(("events", ""))
