"""The port of the queue: every operation, what it does and when it does nothing. This comment is the contract.

Two implementations, one conformance suite: `RedisQueue` (server-side scripts on Redis 7.0+ or Valkey) and `MemoryQueue` (its
twin, for tests and the simulator).

States:   ACCEPTED -> PLACED -> RUNNING -> COMPLETED | FAILED | CANCELLED | EXPIRED
                        ^          |
                        +- requeue +     (unpull, evicted, drained, failed, agent lost: place and progress kept)

Rules that hold for every operation:
- It is atomic and of bounded size: at most `BATCH_MAX` requests or group ids in one call (a longer list, or a greater `count` or
  `requests_max`, raises ValueError).
- A repeat of a call whose answer was lost changes nothing more and answers as the first did, or says that the caller's knowledge is old.
- A call with an old lease raises LeaseLost and changes nothing; an item with an old incarnation, attempt or state is reported and changes
  nothing. Ownership is (incarnation, attempt) in the request's record: `emit`, `complete`, `unpull` and `requeue` need ownership alone, so
  that what was held while the server was away is written after it; `pull` also needs the live lease of the registered incarnation.
- `Unavailable` means that the server could not be asked or did not answer in time: the call may or may not have happened.
- Times are seconds of the server's clock. All streams are trimmed to the bounds in `Bounds`.

A group is *open* while it has waiting (PLACED) requests, and then on exactly one virtual queue; it leaves its virtual queue when its last
waiting request leaves it, and its record lives as long as it has requests that are not terminal. Opening it again on a queue (by `place`,
`unpull` or `requeue`) wakes the queue's agent. Waiting requests of a group are served by acceptance number.

A terminal step (whoever takes it) stores the `Result` for `result_ttl_s`, sends the last frame (with the Result, without its output) to the
request's gateway, deletes everything else of the request, and, if an agent owned it and did not take the step itself, sends that agent
"cancel". A group's record goes with its last live request. The caller gives a serialized Result that lacks what the queue adds: tenant,
request_id, model where it is empty, queue_id, attempts, incarnation, state, timing.accepted_s, timing.finished_s, and the progress as
output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from qlm_core.request import RequestKey, RequestState

BATCH_MAX = 500
"""Most ids that one script call touches."""

PLANNER_ROLE = "planner"
ESTIMATOR_ROLE = "estimator"


class Durability(StrEnum):
    """What survives when a call has answered: a killed process, or a power loss."""

    PROCESS = "process"
    DISK = "disk"


class ControlKind(StrEnum):
    """Messages to an agent (control.proto)."""

    WAKE = "wake"
    HEAD_CHANGED = "head"
    CANCEL = "cancel"
    GATEWAY_REBOUND = "rebound"
    DRAIN = "drain"


class RequeueCause(StrEnum):
    """Why a request went back to its place. FAILED and LOST count as failed attempts, the others do not."""

    EVICTED = "evicted"
    DRAINED = "drained"
    FAILED = "failed"
    LOST = "lost"


class StepStatus(StrEnum):
    """What became of one item of a call."""

    DONE = "done"
    STALE = "stale"  # ended, or owned by another incarnation or attempt: nothing was changed
    GAP = "gap"  # emit and complete: progress is shorter than the offset given; nothing was changed
    ENDED = "ended"  # requeue: it had failed `attempts_max` times and is FAILED now


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of one queue; all are configurable."""

    queue_max: int = 500_000
    tenant_max: int = 250_000
    class_max: int = 400_000
    attempts_max: int = 3
    result_ttl_s: float = 3600.0
    frames_max: int = 20_000
    frames_ttl_s: float = 60.0
    control_max: int = 10_000
    events_max: int = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A held lease. `token` is its whole value "<fence>:<nonce>", which scripts compare."""

    role: str
    token: str

    @property
    def fence(self) -> int:
        return int(self.token.partition(":")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """A request on its way into the queue. `body`: the serialized api `Request`; `digest`: 16 bytes that stand for what the
    client sent; `slo_class`: the class it is counted under; `expire_after_s`: None for never."""

    key: RequestKey
    body: bytes
    digest: bytes
    gateway: str
    slo_class: str
    prompt_tokens: int
    expire_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptReceipt:
    """`duplicate`: the key with this digest was accepted before; this is that request, as it is now, and nothing was changed.
    For one that has ended, `acceptance_number` and `accepted_s` are 0."""

    queue_id: str
    acceptance_number: int
    accepted_s: float
    state: RequestState
    duplicate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """A request that has not ended, as read back. `group_id`, `incarnation`: "" for none. `body` as accepted."""

    queue_id: str
    key: RequestKey
    acceptance_number: int
    accepted_s: float
    state: RequestState
    group_id: str
    incarnation: str
    attempt: int
    failed_attempts: int
    gateway: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """A group that `place` may have to open. `meta` is kept as it is for a rebuild (see `GroupRecord`), and its "model" is what `pull`
    compares; `before`: the group id in front of which it is opened, "" for the end, also used where that group is not on the queue."""

    group_id: str
    instance: str
    before: str
    first_deadline_s: float
    meta: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlacement:
    """One request for one of the groups of the same `place` call."""

    queue_id: str
    key: RequestKey
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A group as read back. `instance`: its virtual queue, "" while it is not open; `last_instance`: the one it is or was on.
    `first_deadline_s`: set when `place` opens the group, lowered by `place` while it is open. `version` grows by one when the group is
    opened, closed or moved to another queue."""

    group_id: str
    instance: str
    last_instance: str
    waiting: int
    live: int
    waiting_prompt_tokens: int
    first_deadline_s: float
    version: int
    meta: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSegment:
    """A run of groups for one virtual queue: those of `group_ids` that are open are taken from wherever they are and put, in this order, at
    `start` (0: the head; beyond the end: the end) of what is left of the queue. Groups that are not named keep their relative order."""

    instance: str
    start: int
    group_ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChunk:
    """`versions`: the version of every virtual queue that the chunk takes groups from or puts groups on, as the planner knows it."""

    plan_version: int
    versions: Mapping[str, int]
    segments: Sequence[QueueSegment]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedChunk:
    """`applied`: False where a version did not match, the plan version is older than the last one applied, a segment's instance is not
    registered or not in `versions`, or a named open group is on a queue that `versions` does not name; then nothing was changed.
    `versions`: those of the named queues now. `moved`: groups now on another queue than before."""

    applied: bool
    versions: Mapping[str, int]
    moved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullBudget:
    """What an agent can take. A request needs prompt + produced (4 bytes of progress a token) + `output_reserve_tokens` tokens of KV.
    The first request of a pull is given whatever it needs if the incarnation runs nothing, so that one that can never fit is ended by
    the agent, not blocked for ever."""

    requests_max: int
    kv_tokens: int
    output_reserve_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A request now RUNNING and owned. `progress`: output so far, as stored (see `emit`)."""

    queue_id: str
    key: RequestKey
    group_id: str
    acceptance_number: int
    accepted_s: float
    attempt: int
    failed_attempts: int
    gateway: str
    body: bytes
    progress: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """`head_group`, `head_model`: the first group now on the virtual queue, "" if it is empty; a model other than the one pulled for asks
    for a model swap. `blocked_tokens`: KV tokens that its first request needs, where the budget stopped the pull, else 0."""

    pulled: Sequence[Pulled]
    head_group: str
    head_model: str
    blocked_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """New output of one request. `offset`: bytes of progress before it; `progress`: its bytes, token ids as little-endian uint32 or, where
    `text`, serialized `Result.output_pieces` fields; `frame`: the serialized `Frame`, b"" to store progress without showing it."""

    queue_id: str
    key: RequestKey
    attempt: int
    offset: int
    progress: bytes
    frame: bytes
    text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The end of a request by its owner: COMPLETED or FAILED, with its last output in `last` (both parts may be empty; `last.frame` is
    the serialized Frame of that output without a result; one of queue id, attempt and Result alone is made if it is empty). `result`:
    see "A terminal step" above. `event`: serialized fields 10 up of RequestEvent."""

    last: Emission
    state: RequestState
    result: bytes
    event: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A request that the caller believes to own."""

    queue_id: str
    key: RequestKey
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalRecord:
    """A finished request. `result`: the serialized Result with its output."""

    state: RequestState
    digest: bytes
    queue_id: str
    attempt: int
    result: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """One of `ended` and `live` is set. `progress`: the bytes from the offset asked for; `produced`: bytes produced in all."""

    ended: TerminalRecord | None
    live: LiveRequest | None
    progress: bytes
    produced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEntry:
    """One entry of a stream. For frames and events `payload` is a FrameBatch or RequestEvents; for control see `ControlEntry`."""

    entry_id: str
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEntry:
    """A message to an agent; `queue_id` and `attempt` for CANCEL and GATEWAY_REBOUND, else "" and 0."""

    entry_id: str
    kind: ControlKind
    queue_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRecord:
    """A registered instance. `body`: the serialized api `Instance`. `alive`: its lease holds."""

    name: str
    incarnation: str
    alive: bool
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualQueueRecord:
    """`group_ids`: first is served first. `running`: requests that the registered incarnation owns. `version` grows by one with each group
    that is opened on the queue and with each chunk of a plan that changes it, not when a group drains."""

    instance: str
    version: int
    group_ids: Sequence[str]
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The whole queue but for its requests, read in one step. `incarnations`: those that may own requests -> lease alive.
    `last_event_id`: events after it tell what changed since."""

    plan_version: int
    accepted_count: int
    live: int
    unplaced: int
    virtual_queues: Sequence[VirtualQueueRecord]
    groups: Mapping[str, GroupRecord]
    instances: Sequence[InstanceRecord]
    incarnations: Mapping[str, bool]
    last_event_id: str


class Queue(Protocol):
    """One queue. Blocking reads take `block_s` (0: do not wait) and return what there is, perhaps nothing."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Connects and loads the scripts. Safe twice. Raises Unavailable; ConfigError where the server cannot keep the durability."""

    async def stop(self) -> None:
        """Closes all connections. Safe unstarted and twice."""

    async def server_time_s(self) -> float:
        """Seconds since the epoch by the server's clock."""

    # Leases -----------------------------------------------------------------------------------------------------------

    async def acquire_lease(self, role: str, nonce: str, ttl_s: float, address: str) -> Lease | None:
        """Takes the lease of a role if it is free, with a new fence, and publishes the holder's address; None if another holds it.
        A repeat with the nonce that holds it returns that lease."""

    async def renew_lease(self, lease: Lease, ttl_s: float) -> None:
        """Raises LeaseLost if it expired or belongs to another; an expired lease is never renewed."""

    async def release_lease(self, lease: Lease) -> None:
        """Gives a lease back; nothing if it is lost."""

    async def leader_address(self, role: str) -> str:
        """Address of the live holder, or ""."""

    # Instances --------------------------------------------------------------------------------------------------------

    async def register(self, instance: str, nonce: str, body: bytes, ttl_s: float) -> tuple[str, Lease]:
        """A new incarnation "<instance>/<fence>" of an instance with its lease (role = the incarnation); `body` is stored. It makes the
        virtual queue if there is none. Older incarnations of the instance can no longer pull. A repeat with the nonce of the registered
        incarnation, its lease alive, returns that incarnation."""

    async def describe(self, lease: Lease, body: bytes) -> None:
        """Replaces the stored body of the incarnation (the lease's role). Raises LeaseLost."""

    async def deregister(self, lease: Lease) -> None:
        """Ends an incarnation that owns nothing; what it still owns stays for `reclaim`. The instance's groups stay on its queue."""

    async def forget_instance(self, lease: Lease, instance: str) -> bool:
        """Planner: removes an instance whose incarnation is gone and whose virtual queue is empty; False if that is not so."""

    # Gateway ----------------------------------------------------------------------------------------------------------

    async def accept(self, acceptance: Acceptance) -> AcceptReceipt:
        """Makes a request durable. Raises QueueFull (details bound: queue, tenant or class; limit) or RequestIdConflict, and then
        changes nothing."""

    async def attach(self, key: RequestKey, gateway: str, offset: int) -> Attached:
        """Rebinds a live request to a gateway and returns its progress from byte `offset`; frames from then on go to that gateway.
        gateway "" only reads. The agent of a running request is told (GATEWAY_REBOUND) where the gateway is another than before. Raises
        NotFound; OffsetOutOfRange (details offset, produced) beyond what was produced, changing nothing."""

    async def cancel(self, key: RequestKey, result: bytes) -> RequestState:
        """Ends a live request as CANCELLED with this Result, or returns the terminal state it has. Raises NotFound."""

    async def expire(self, result: bytes) -> int:
        """Ends up to BATCH_MAX requests whose expiry has passed as EXPIRED with this Result; returns how many. Anyone may call it."""

    async def read_frames(self, gateway: str, after: str, block_s: float) -> Sequence[StreamEntry]:
        """Frames for a gateway after an entry id ("0" at first), at most 1,000 entries."""

    # Planner ----------------------------------------------------------------------------------------------------------

    async def read_arrivals(self, block_s: float, count: int) -> Sequence[LiveRequest]:
        """Requests of the global queue that no planner has read yet (consumer group `planner`); they stay pending until placed.
        One that ended or was placed meanwhile is not given."""

    async def read_unplaced(self, after: str, count: int) -> Sequence[LiveRequest]:
        """Accepted requests that are not placed, in queue id order, after a queue id ("" from the start), read by a planner or not."""

    async def place(
        self, lease: Lease, groups: Sequence[GroupPlacement], requests: Sequence[RequestPlacement]
    ) -> Sequence[StepStatus]:
        """Puts ACCEPTED requests into groups: DONE (also if it waits in that group already), or STALE. A group that is open stays where it
        is; else it is opened on its instance's queue ("unassigned" if that instance is not registered). A group none of whose requests
        could be placed is not opened. A group is opened, with this `meta`, when its first request is placed. A request
        of a group that is not in `groups` raises ValueError."""

    async def apply_plan(self, lease: Lease, chunk: PlanChunk) -> AppliedChunk:
        """Moves whole groups (see QueueSegment), one segment after the other. Sends "head" to instances whose first group changed (or
        went). A chunk that names a group twice raises ValueError."""

    async def reclaim(self, lease: Lease, incarnation: str, failure: bytes) -> int:
        """Requeues (LOST) up to BATCH_MAX requests of an incarnation whose lease is gone; returns how many were taken (0: it owns nothing
        and is forgotten). Latest accepted first, so that the earliest group opened again is the head. An incarnation whose lease is alive
        keeps all: returns 0. `failure` as in `requeue`."""

    # Agent ------------------------------------------------------------------------------------------------------------

    async def pull(self, lease: Lease, model: str, budget: PullBudget) -> PullResult:
        """Takes waiting requests of the first groups of the incarnation's virtual queue, as long as these are of `model`; counts the
        attempt. "" pulls nothing and tells the head. Ends expired ones as EXPIRED instead. Raises LeaseLost."""

    async def owned(self, incarnation: str) -> Sequence[Pulled]:
        """All that an incarnation owns: after a lost answer of `pull`, to find what it does not know of."""

    async def unpull(self, incarnation: str, requests: Sequence[Owned]) -> Sequence[StepStatus]:
        """Gives back what was pulled but not started: PLACED again at its place. The attempt stays counted."""

    async def emit(self, incarnation: str, emissions: Sequence[Emission]) -> Sequence[StepStatus]:
        """Appends output and sends frames, one entry a gateway. Where nothing of it is new (a repeat, or no bytes) it is DONE and
        nothing is sent; where a part is new, that part is stored and the frame is sent."""

    async def complete(self, incarnation: str, completions: Sequence[Completion]) -> Sequence[StepStatus]:
        """Ends requests. DONE for a repeat by the same attempt; STALE for an older one or a request that ended otherwise."""

    async def requeue(
        self, incarnation: str, requests: Sequence[Owned], cause: RequeueCause, failure: bytes
    ) -> Sequence[StepStatus]:
        """Returns running requests to their exact place with their progress: the group's order by acceptance number; a group that must be
        opened again goes to the head of the queue it was on (behind the head if EVICTED). With cause FAILED a request that has now failed
        `attempts_max` times is ENDED as FAILED with the Result `failure`."""

    async def read_control(self, instance: str, after: str, block_s: float) -> Sequence[ControlEntry]:
        """Messages for an instance's agent after an entry id ("0" at first; "$" for only new ones)."""

    # Everyone ---------------------------------------------------------------------------------------------------------

    async def find(self, key: RequestKey) -> LiveRequest | TerminalRecord:
        """A request. Raises NotFound."""

    async def requests_ahead(self, key: RequestKey) -> int:
        """Waiting requests before a PLACED request on its virtual queue (over at most BATCH_MAX groups); 0 for others."""

    async def waiting(self, group_id: str, after: int, count: int) -> Sequence[LiveRequest]:
        """Waiting requests of a group after an acceptance number, in order."""

    async def overview(self) -> Overview:
        """All virtual queues, groups and instances."""

    async def read_events(self, after: str, block_s: float, count: int) -> Sequence[StreamEntry]:
        """Lifecycle events after an entry id ("0": the oldest kept; "$": only new ones)."""

    async def publish_profiles(self, lease: Lease, version: int, body: bytes) -> None:
        """Stores the profile snapshot. Raises LeaseLost."""

    async def read_profiles(self) -> tuple[int, bytes]:
        """Version and snapshot; (0, b"") if none was published."""
