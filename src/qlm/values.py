"""Plain values that the SDK takes and gives. Units are the last word of a name; times are seconds of the queue's clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RequestState(StrEnum):
    """States of a request (`RequestState` in request.proto)."""

    ACCEPTED = "accepted"
    PLACED = "placed"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self not in (RequestState.ACCEPTED, RequestState.PLACED, RequestState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A latency objective: make one with `completion`, `first_token` or `priority_of`."""

    kind: str
    seconds: float = 0.0
    priority: int = 0

    @classmethod
    def completion(cls, seconds: float) -> Slo:
        """Seconds from acceptance to the last token."""
        return cls(kind="completion", seconds=seconds)

    @classmethod
    def first_token(cls, seconds: float) -> Slo:
        """Seconds from acceptance to the first token."""
        return cls(kind="first_token", seconds=seconds)

    @classmethod
    def priority_of(cls, priority: int) -> Slo:
        """Strict priority, lower first; no deadline."""
        return cls(kind="priority", priority=priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """When a request starts and ends, from now, as quantiles; and the requests expected to be served before it. One that runs has started:
    its wait is 0. `probability_late`: that its SLO is missed, None without one in seconds, and
    where the first token that it bounds has been made."""

    wait_p50_s: float
    wait_p90_s: float
    completion_p50_s: float
    completion_p90_s: float
    requests_ahead: int
    profile_version: int
    probability_late: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The present state of a waiting request, as its stream reports it. `state`: ACCEPTED or PLACED. `prediction`: None where none can be
    made. `paused`: its model or tenant is paused, so it waits until an operator resumes it."""

    state: RequestState
    prediction: Prediction | None
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Facts of an acceptance. `duplicate`: the id was accepted before and this is that request. `prediction`: None where
    none can be made. `paused`: as in `Outlook`."""

    tenant: str
    request_id: str
    queue_id: str
    duplicate: bool
    state: RequestState
    accepted_s: float
    prompt_tokens: int
    prediction: Prediction | None
    paused: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities (natural) in the place of one output token: its own, and by id those of the likeliest, the likeliest first."""

    of_token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Consecutive output: token ids (or `pieces`, from engines that give only text) from index `offset` on, and as text. `logprobs`: one
    for each token, where requested."""

    offset: int
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def count(self) -> int:
        return len(self.token_ids) or len(self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of a request; 0 where it never happened."""

    accepted_s: float
    placed_s: float
    started_s: float
    first_token_s: float
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of a request. `finish_reason`: "stop", "length" or "". `error_reason`: a reason of errors.proto, "" where it
    COMPLETED. The output is empty on the result of a stream, which has given it. `logprobs`: as in TokenChunk."""

    tenant: str
    request_id: str
    queue_id: str
    model: str
    state: RequestState
    finish_reason: str
    error_reason: str
    error_message: str
    prompt_tokens: int
    output_tokens: int
    attempts: int
    incarnation: str
    timing: Timing
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """One request now. `requests_ahead`: None unless it waits in a virtual queue. `prediction`: None where none can be made. `slo`: the
    gateway's default where it named none. `deadline_s`: acceptance + SLO; None without an SLO in seconds, and at a terminal state, as `slo`
    is. `error_reason`, `error_message`: as in `Result`. `finished_s`: None until it has ended. `paused`: as
    in `Outlook`."""

    state: RequestState
    queue_id: str
    group_id: str
    instance: str
    requests_ahead: int | None
    output_tokens: int
    attempts: int
    accepted_s: float
    prediction: Prediction | None
    slo: Slo | None = None
    deadline_s: float | None = None
    model: str = ""
    error_reason: str = ""
    error_message: str = ""
    finished_s: float | None = None
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRequest:
    """A request that has not ended, without its prompt and output. `instance`: on whose virtual queue it waits, or who runs it; "" until it
    is placed. `deadline_s`: None without an SLO in seconds."""

    tenant: str
    request_id: str
    queue_id: str
    model: str
    state: RequestState
    slo_class: str
    accepted_s: float
    deadline_s: float | None
    instance: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPage:
    """Some requests that have not ended, in the order of acceptance. `next_after`: where the next page begins, "" where the queue has none
    behind this one. `now_s`: the queue's clock."""

    requests: tuple[ListedRequest, ...]
    next_after: str
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """A request group on a virtual queue. `slo_kind`: "completion", "first_token" or "priority"."""

    group_id: str
    model: str
    slo_kind: str
    slo_class: str
    waiting: int
    first_deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualQueueStatus:
    """A virtual queue; `groups`: first is served first."""

    instance: str
    version: int
    groups: tuple[GroupStatus, ...]
    running: int
    alive: bool
    active_model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A paused model or tenant; the other is "". `since_s`: by the queue's clock."""

    model: str
    tenant: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes that live requests and kept results hold, against a bound. `bound`: "queue", "tenant" or "class"; `name`: of the tenant or
    class; `limit`: 0 for no bound."""

    bound: str
    name: str
    held: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """The queue: requests that have not ended (`live`), of these in no group yet (`unplaced`), and running. `planner`: "host:port" of the
    leading planner, "" where none leads. `refusal`: why nothing is accepted now, "" if it is. `damage_count`: damaged records that were
    mended, ever. `held`: bytes of the queue, and of the tenant and the SLO class that hold most. `loss`: what
    the queue's server has lost of what it acknowledged, "" for nothing."""

    queue: str
    live: int
    unplaced: int
    running: int
    virtual_queues: tuple[VirtualQueueStatus, ...]
    request: RequestStatus | None
    planner: str = ""
    refusal: str = ""
    damage_count: int = 0
    pauses: tuple[Pause, ...] = ()
    held: tuple[HeldBytes, ...] = ()
    loss: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A served model. `token_count`: "exact" or "approximate". `instances`: live ones that can serve it."""

    name: str
    context_tokens_max: int
    token_count: str
    instances: int
