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
- `Unavailable` means that the server could not be reached or did not answer in time: the call may or may not have happened.
- Times are seconds of the server's clock. All streams are trimmed to the bounds in `Bounds`.

A group is *open* while it has waiting (PLACED) requests, and then on exactly one virtual queue; it leaves its virtual queue when its last
waiting request leaves it, and its record lives as long as it has requests that are not terminal. Opening it again on a queue (by `place`,
`unpull` or `requeue`) wakes the queue's agent. Waiting requests of a group are served by acceptance number.

A terminal step (whoever takes it) stores the `Result` for `result_ttl_s`, sends the last frame (with the Result, without its output) to the
request's gateway, deletes everything else of the request, and, if an agent owned it and did not take the step itself, sends that agent
"cancel". A group's record goes with its last live request. The caller gives a serialized Result that lacks what the queue adds: tenant,
request_id, model where it is empty, queue_id, attempts, incarnation, state, timing, and the progress as output.
`timing.placed_s` is the last `place`, `timing.started_s` the first pull that was not given back by `unpull`, `timing.first_token_s` when
the first output was stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.bounds import HeldBytes
from qlm_queue.damage import Damage
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


class Queue(Protocol):
    """One queue. Blocking reads take `block_s` (0: do not wait) and return what there is, perhaps nothing."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Connects and loads the scripts. Safe twice. Raises Unavailable; ConfigError where the server cannot keep the durability, or holds
        data of another version. (After a reconnect such data makes calls Unavailable.)"""

    async def stop(self) -> None:
        """Closes all connections. Safe unstarted and twice."""

    async def server_time_s(self) -> float:
        """Seconds since the epoch by the server's clock."""

    # Leases -----------------------------------------------------------------------------------------------------------

    async def acquire_lease(self, role: str, nonce: str, ttl_s: float, address: str) -> Lease | None:
        """Takes the lease of a role if it is free, with a new fence, and publishes the holder's address; None if another holds it.
        A repeat with the nonce that holds it returns that lease."""

    async def renew_lease(self, lease: Lease, ttl_s: float, within_s: float | None = None) -> None:
        """Raises LeaseLost if it expired or belongs to another; an expired lease is never renewed. `within_s`: a deadline below that
        of other calls; after it the connection is taken for broken, and later calls go on another."""

    async def release_lease(self, lease: Lease) -> None:
        """Gives a lease back; nothing if it is lost."""

    async def leader_address(self, role: str) -> str:
        """Address of the live holder, or ""."""

    # Instances --------------------------------------------------------------------------------------------------------

    async def register(self, instance: str, nonce: str, body: bytes, ttl_s: float) -> tuple[str, Lease]:
        """A new incarnation "<instance>/<fence>" of an instance with its lease (role = the incarnation); `body` is stored. It makes the
        virtual queue if there is none. Older incarnations of the instance can no longer pull, and the lease of the last one ends half of
        `ttl_s` earlier, unless it is renewed. A repeat with the nonce of the registered incarnation, its lease alive, returns that
        incarnation."""

    async def describe(self, lease: Lease, body: bytes) -> None:
        """Replaces the stored body of the incarnation (the lease's role). Raises LeaseLost."""

    async def deregister(self, lease: Lease) -> None:
        """Ends an incarnation that owns nothing; what it still owns stays for `reclaim`. The instance's groups stay on its queue."""

    async def forget_instance(self, lease: Lease, instance: str) -> bool:
        """Planner: removes an instance whose incarnation is gone and whose virtual queue is empty; False if that is not so."""

    # Gateway ----------------------------------------------------------------------------------------------------------

    async def accept(self, acceptance: Acceptance) -> AcceptReceipt:
        """Makes a request durable. Raises QueueFull (details bound: queue, tenant or class, each also with "_bytes", or memory; limit; for
        bytes also held, and retry_after_s where results hold most places: until the first goes) or RequestIdConflict, and then changes
        nothing; Unavailable also where the server would not keep it."""

    async def held(self) -> Sequence[HeldBytes]:
        """Bytes held against the bounds: of the queue, and of the tenant and the class that hold most. A live request holds
        `RECORD_BYTES`, its body and its output so far, a result in its window `RECORD_BYTES`, the Result as given and the output."""

    async def refusal(self) -> str:
        """Why nothing is accepted now (settings of the server, its memory, its log of writes), "" if it is."""

    async def loss(self) -> str:
        """Describes acknowledged writes that the server lost (a lost log of writes, an old copy), as far as this process noticed in the
        last `result_ttl_s`; "" for nothing."""

    async def attach(self, key: RequestKey, gateway: str, offset: int) -> Attached:
        """Rebinds a live request to a gateway and returns its progress from byte `offset`; frames from then on go to that gateway.
        gateway "" only reads. The agent of a running request gets GATEWAY_REBOUND where the gateway is another than before. Raises
        NotFound; OffsetOutOfRange (details offset, produced) beyond what was produced, changing nothing."""

    async def cancel(self, key: RequestKey, result: bytes) -> RequestState:
        """Ends a live request as CANCELLED with this Result, or returns the terminal state it has. Raises NotFound."""

    async def erase(self, key: RequestKey, result: bytes) -> RequestState:
        """`cancel`, and forgets the end: the Result goes, its bytes are no longer counted, and the id is free. Frames and events stay until
        they are trimmed. Raises NotFound, also for a repeat."""

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

    async def place(self, lease: Lease, groups: Sequence[GroupPlacement], requests: Sequence[RequestPlacement]) -> Sequence[StepStatus]:
        """Puts ACCEPTED requests into groups: DONE (also if it waits in that group already), or STALE. A group that is open stays where it
        is; else it is opened on its instance's queue ("unassigned" if that instance is not registered). A group none of whose requests
        could be placed is not opened. A group is opened, with this `meta`, when its first request is placed. A request
        of a group that is not in `groups` raises ValueError."""

    async def regroup(self, lease: Lease, source: str, into: GroupPlacement, requests: Sequence[WaitingRequest]) -> Sequence[StepStatus]:
        """Takes requests that wait in the group `source` to another one: DONE (also if it waits there already), or STALE where it runs,
        ended or waits elsewhere. They keep attempts, progress and acceptance number, so those of `into` are served in the order of all.
        `into` is opened, or gets a deadline, as by `place`, with the first request that is taken there; its "model" and "slo_kind", as
        given and as stored, are those of `source`, or all are STALE. Sends "head" to the instance whose first group drained by it. A
        group from which its last live request is taken goes. `source` as `into` raises ValueError."""

    async def apply_plan(self, lease: Lease, chunk: PlanChunk) -> AppliedChunk:
        """Moves whole groups (see QueueSegment), one segment after the other. Sends "head" to instances whose first group changed (or
        left), and writes an event GROUPS_MOVED for the groups of each segment that are on another queue now. A chunk that names a
        group twice raises ValueError."""

    async def reclaim(self, lease: Lease, incarnation: str, failure: bytes) -> int:
        """Requeues (LOST) up to BATCH_MAX requests of an incarnation whose lease is gone; returns how many were taken (0: it owns nothing
        and is forgotten). Latest accepted first, so that the earliest group opened again is the head. An incarnation whose lease is alive
        keeps all: returns 0. The loss of an agent is no failed attempt; one that was pulled `pulls_max` times ends as FAILED with this
        Result."""

    async def shed(self, lease: Lease, group_id: str, keep: int, count: int, oldest: bool, failure: bytes) -> int:
        """Ends up to `count` waiting requests of a group as FAILED with this Result, the `oldest` or the newest first, as long as more than
        `keep` wait; returns how many. 0 for a group that has none. A repeat ends no more than are above `keep`."""

    # Agent ------------------------------------------------------------------------------------------------------------

    async def pull(self, lease: Lease, model: str, budget: PullBudget) -> PullResult:
        """Takes waiting requests of the first groups of the incarnation's virtual queue, as long as these are of `model`; counts the
        attempt. "" pulls nothing. Ends expired ones as EXPIRED instead. Reports the head and the groups behind it as they are after it.
        Raises LeaseLost."""

    async def owned(self, incarnation: str) -> Sequence[Pulled]:
        """All that an incarnation owns: after a lost answer of `pull`, to find what it does not know of."""

    async def unpull(self, incarnation: str, requests: Sequence[Owned], behind_head: bool = False) -> Sequence[StepStatus]:
        """Gives back what was pulled but not started: PLACED again at its place. The attempt stays counted. A group that must be opened
        again goes to the head of the queue it was on, or `behind_head`: it makes way for that."""

    async def emit(self, incarnation: str, emissions: Sequence[Emission]) -> Sequence[StepStatus]:
        """Appends output and sends frames, one entry a gateway. Where nothing of it is new (a repeat, or no bytes) it is DONE and
        nothing is sent; where a part is new, that part is stored and the frame is sent."""

    async def complete(self, incarnation: str, completions: Sequence[Completion]) -> Sequence[StepStatus]:
        """Ends requests. DONE for a repeat by the same attempt; STALE for an older one or a request that ended otherwise."""

    async def requeue(self, incarnation: str, requests: Sequence[Owned], cause: RequeueCause, failure: bytes) -> Sequence[StepStatus]:
        """Returns running requests to their exact place with their progress: the group's order by acceptance number; a group that must be
        opened again goes to the head of the queue it was on (behind the head if EVICTED). With cause FAILED a request that has now failed
        `attempts_max` times is ENDED as FAILED with the Result `failure`. A request that failed is pulled alone (`PullBudget`)."""

    async def read_control(self, instance: str, after: str, block_s: float) -> Sequence[ControlEntry]:
        """Messages for an instance's agent after an entry id ("0" at first; "$" for only new ones)."""

    # Operator ---------------------------------------------------------------------------------------------------------

    async def live_requests(self, after: str, count: int) -> LivePage:
        """Requests that have not ended, in queue id order, after a queue id ("" from the start), without their prompts. It reads at most
        `count` (1 to BATCH_MAX) of them, and no further one once it has read `PAGE_BYTES_MAX` of bodies."""

    async def pause(self, kind: PauseKind, name: str) -> bool:
        """From now on `pull` gives no request for a model, or of a tenant; False if that is so already. Running requests continue, and
        requests are accepted and placed. Instead of giving it, `pull` puts a group of a paused model that is the head on "unassigned"
        (GROUPS_MOVED), and makes a request of a paused tenant that it meets ACCEPTED again, with its progress (UNPLACED), at most
        `HELD_BACK_MAX` in a call. Raises QueueFull where `PAUSES_MAX` are paused."""

    async def resume(self, kind: PauseKind, name: str) -> bool:
        """Ends a pause; False where there is none. The planner brings what waits back to instances."""

    # Everyone ---------------------------------------------------------------------------------------------------------

    async def find(self, key: RequestKey) -> LiveRequest | TerminalRecord:
        """A request. Raises NotFound."""

    async def requests_ahead(self, key: RequestKey) -> tuple[str, int]:
        """The virtual queue of a PLACED request and the waiting requests before it there (over at most BATCH_MAX groups); ("", 0) for
        others."""

    async def waiting(self, group_id: str, after: int, count: int) -> Sequence[LiveRequest]:
        """Waiting requests of a group after an acceptance number, in order."""

    async def overview(self, group_ids: Sequence[str] | None = None) -> Overview:
        """All virtual queues and instances, and all groups, which is the one call whose size has no bound; with `group_ids`, of the groups
        only these (those that exist; at most BATCH_MAX)."""

    async def repair(self, mend: bool) -> Sequence[Damage]:
        """Checks every record and reports the damaged ones; with `mend`, also repairs them. Values that can be derived from the stream and
        the hashes of requests (members of groups, virtual queues, what runs, counters, expiries) are; requests of a group whose record is
        lost are ACCEPTED again, to be placed; those that run nowhere return to their place; those whose own record, body or shown output is
        lost end as FAILED (RECORD_DAMAGED); a key of another type is set aside. Any call that meets damage raises Unavailable and begins a
        repair. Safe beside all other calls. Not bounded: it goes through the queue in pages, and once through all of it where it mended."""

    async def condemn(self, queue_ids: Sequence[str]) -> int:
        """Ends live requests whose body the caller cannot read as FAILED (RECORD_DAMAGED); returns how many."""

    async def read_events(self, after: str, block_s: float, count: int) -> Sequence[StreamEntry]:
        """Lifecycle events after an entry id ("0": the oldest kept; "$": only new ones)."""

    async def report(self, events: Sequence[bytes]) -> None:
        """Appends serialized RequestEvents that no operation writes, as one entry; nothing where there are none. A repeat appends them
        again. Raises ValueError for bytes that are no RequestEvent."""

    async def publish_waits(self, lease: Lease, body: bytes) -> None:
        """Stores the waits that the planner predicts (PlannedWaits, at most `WAITS_BYTES_MAX`). Raises LeaseLost, and ValueError for more
        bytes."""

    async def read_waits(self) -> WaitsRecord:
        """Reads the last record of `publish_waits`, with counts of the queue and its pauses. O(pauses)."""

    async def publish_profiles(self, lease: Lease, version: int, body: bytes) -> None:
        """Stores the profile snapshot. Raises LeaseLost."""

    async def read_profiles(self) -> tuple[int, bytes]:
        """Version and snapshot; (0, b"") if none was published."""
