"""Arguments and results of the queue's operations (see `qlm_queue.port`). Times are seconds of the server's clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.bounds import Bounds as Bounds

BATCH_MAX = 500
"""Most ids that one script call touches."""

WAITS_BYTES_MAX = 1 << 20
"""Most bytes of the published waits."""

PLANNER_ROLE = "planner"
ESTIMATOR_ROLE = "estimator"


class Durability(StrEnum):
    """Failures that an answered call survives: a killed process, a power loss, or the loss of the server (`replicas` others have it)."""

    PROCESS = "process"
    DISK = "disk"
    REPLICA = "replica"


class ControlKind(StrEnum):
    """Messages to an agent (control.proto)."""

    WAKE = "wake"
    HEAD_CHANGED = "head"
    CANCEL = "cancel"
    GATEWAY_REBOUND = "rebound"
    DRAIN = "drain"


class RequeueCause(StrEnum):
    """Why a request returned to its place. FAILED counts as a failed attempt; SUSPECTED (the engine broke with others on it, one of which
    may be why) too, but never as the last one."""

    EVICTED = "evicted"
    DRAINED = "drained"
    FAILED = "failed"
    SUSPECTED = "suspected"
    LOST = "lost"


class StepStatus(StrEnum):
    """Result of one item of a call."""

    DONE = "done"
    STALE = "stale"  # ended, or owned by another incarnation or attempt: nothing was changed
    GAP = "gap"  # emit and complete: progress is shorter than the offset given; nothing was changed
    ENDED = "ended"  # requeue: it had failed `attempts_max` times and is FAILED now


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
    """A request that has not ended, as read back. `group_id`, `incarnation`: "" for none. `body` as accepted. `text`: its output so far is
    pieces, not token ids. `placed_s`, `started_s`, `first_token_s`: its last placement, first pull and first output, 0 where there was
    none."""

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
    text: bool = False
    placed_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """A group that `place` may have to open. `meta` is kept as it is for a rebuild (see `GroupRecord`), and its "model" is what `pull`
    compares; `before`: the group id in front of which it is opened, "" for the end, also used where that group is not on the queue.
    `first_deadline_s`, `last_deadline_s`, `slo_least_s`: the first and the last deadline and the least SLO (seconds) of the requests of
    this call, infinite for PRIORITY."""

    group_id: str
    instance: str
    before: str
    first_deadline_s: float
    meta: Mapping[str, str]
    last_deadline_s: float = -math.inf
    slo_least_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlacement:
    """One request for one of the groups of the same `place` call."""

    queue_id: str
    key: RequestKey
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request that the caller believes to wait in a group."""

    queue_id: str
    key: RequestKey


@dataclass(slots=True, kw_only=True)
class GroupRecord:
    """A group as read back. `instance`: its virtual queue, "" while it is not open; `last_instance`: the one it is or was on.
    `slo_least_s`: least of all that `place` and `regroup` gave. `first_deadline_s`: set when these open the group; lowered by them while it
    is open, and to acceptance + `slo_least_s` of a request that returns. `last_deadline_s`: last of all that they gave, never before the
    first: no deadline in the group is after it. `next_deadline_s`: no deadline of a waiting request is before it (as in
    `HeadGroup`). (Not frozen, since each overview makes one of every group.)"""

    group_id: str
    instance: str
    last_instance: str
    waiting: int
    live: int
    waiting_prompt_tokens: int
    first_deadline_s: float
    next_deadline_s: float
    last_deadline_s: float
    meta: Mapping[str, str]
    slo_least_s: float = math.inf


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
    """Room of an agent. A request needs prompt + produced (4 bytes of progress a token) + `output_reserve_tokens` tokens of KV.
    The first request of a pull is given whatever it needs if the incarnation runs nothing, so that one that can never fit is ended by
    the agent, not blocked for ever. `owned_aside`: requests that it owns and does not run now: offloaded, or on their way back. A request
    that has failed is given alone, to an idle incarnation; with `suspects` (all that it runs has failed once too, and has made output
    since) also one that has failed once. `behind_max`: groups behind the head to report, at most `BATCH_MAX`."""

    requests_max: int
    kv_tokens: int
    output_reserve_tokens: int
    owned_aside: int = 0
    suspects: bool = False
    behind_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A request now RUNNING and owned. `progress`: output so far, as stored (see `emit`); `text`: it is pieces, not token ids; `logprobs`:
    those of its tokens, b"" where it has none (see `Emission`)."""

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
    text: bool = False
    logprobs: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGroup:
    """The first group of a virtual queue. `waiting_prompt_tokens`: of its waiting requests. `first_deadline_s`: a bound that no deadline of
    them is before: the later of the group's `first_deadline_s` and the acceptance of its first waiting request + the group's
    `slo_least_s`; infinite for PRIORITY. `meta` as in `GroupRecord`."""

    group_id: str
    model: str
    waiting: int
    waiting_prompt_tokens: int
    first_deadline_s: float
    meta: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBehind:
    """A group behind the head of a virtual queue. `waiting`: its requests; `first_deadline_s`: no deadline of them is before; the others as
    in its `meta`."""

    model: str
    slo_class: str
    slo_kind: str
    waiting: int
    first_deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """`head`: the first group now on the virtual queue, None if it is empty; a model other than the one pulled for needs a model swap.
    `blocked_tokens`: KV tokens that its first request needs, where the budget stopped the pull, else 0; `suspect`: it is to run alone.
    `behind`: the first groups behind the head in the order of the queue, as many as the budget names."""

    pulled: Sequence[Pulled]
    head: HeadGroup | None
    blocked_tokens: int
    behind: tuple[GroupBehind, ...] = ()
    suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """New output of one request. `offset`: bytes of progress before it; `progress`: its bytes, token ids as little-endian uint32 or, where
    `text`, serialized `Result.output_pieces` fields; `frame`: the serialized `Frame`, b"" to store progress without showing it.
    `logprobs`: of each token a serialized `Result.logprobs` field, all equally long; all emissions of a request have them, or none has, and
    none with `text`."""

    queue_id: str
    key: RequestKey
    attempt: int
    offset: int
    progress: bytes
    frame: bytes
    text: bool = False
    logprobs: bytes = b""


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
    """One of `ended` and `live` is set; of its body `live` has the model alone. `progress`: the bytes from the requested offset;
    `produced`: bytes produced in all. `logprobs`: of the tokens in `progress`, where the request is live (see `Emission`); those of one
    that has ended are in its Result."""

    ended: TerminalRecord | None
    live: LiveRequest | None
    progress: bytes
    produced: int
    logprobs: bytes = b""


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
