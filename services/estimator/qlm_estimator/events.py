"""Events of the estimator machine, and its effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.length_model import LengthGuess
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.stream import EntryId
from qlm_estimator.predictions import Judged, Predicted


class LifecycleKind(Enum):
    """Kinds of events of a request. RELEASED: it left its agent unfinished (unpulled, requeued). ENDED: any end but COMPLETED."""

    ACCEPTED = "accepted"
    PULLED = "pulled"
    RELEASED = "released"
    COMPLETED = "completed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """One lifecycle event; `index`: its place among those of one entry. PULLED has a model, COMPLETED what follows it too, and that is what
    an agent claims: anything may stand there. `first_token_s`, `finished_s`: seconds of the server's clock, `first_token_s` 0 where an
    earlier attempt made it; `paused_s`: between them, without a seat in the engine. `started`: RELEASED only; it had begun to run.
    `length_guess`: what a gateway thought at its arrival. `cached_tokens`: that the prefix cache had when it began, None: not known."""

    kind: LifecycleKind
    entry_id: EntryId
    index: int
    queue_id: str
    group_id: str = ""
    incarnation: str = ""
    attempt: int = 0
    acceptance_number: int = 0
    prompt_tokens: int = 0
    model: str = ""
    slo_class: str = ""
    output_tokens: int = 0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    paused_s: float = 0.0
    started: bool = True
    length_guess: LengthGuess | None = None
    cached_tokens: int | None = None


class OperationKind(Enum):
    """Operations of an agent. SWAPPED_WARM, SWAPPED_COLD: a model became active, from host memory or disk; WARMED: from disk to host
    memory; KV_MOVED: KV of requests moved between GPU and host memory."""

    SWAPPED_WARM = "swapped_warm"
    SWAPPED_COLD = "swapped_cold"
    WARMED = "warmed"
    KV_MOVED = "kv_moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedOperation:
    """An operation and what it took by its engine's clock, as an agent claims it: anything may stand there. `index`: as in `Lifecycle`;
    `requests`, `tokens`: size of a move of KV."""

    kind: OperationKind
    entry_id: EntryId
    index: int
    incarnation: str
    model: str
    took_s: float
    requests: int = 0
    tokens: int = 0


class Count(StrEnum):
    """Events that are counted by the second."""

    ACCEPTED = "accepted"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    OUTPUT_TOKENS = "output_tokens"
    PULLED = "pulled"
    UNPULLED = "unpulled"
    EVICTED = "evicted"
    RECOVERED = "recovered"
    KV_OFFLOADED = "kv_offloaded"
    KV_RESTORED = "kv_restored"
    MODELS_SWAPPED = "models_swapped"
    MODELS_WARMED = "models_warmed"
    GROUPS_MOVED = "groups_moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that ended as `state`, COMPLETED, FAILED, CANCELLED or EXPIRED. `latency_s`: acceptance to end; `slack_s`: seconds left
    of its SLO when that was met, negative where it was missed, None where it cannot be judged; `wait_s`: acceptance to the first start,
    None where that is not known."""

    queue_id: str
    at_s: float
    state: Count
    slo_class: str
    latency_s: float
    slack_s: float | None = None
    wait_s: float | None = None
    output_tokens: int = 0

    @property
    def outcome(self) -> str:
        """ "attained", "missed" or "unjudged" (no SLO in seconds is known) of one that completed, else its state."""
        if self.state is not Count.COMPLETED:
            return str(self.state)
        return "unjudged" if self.slack_s is None else "attained" if self.slack_s >= 0.0 else "missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClass:
    """The machine's part of a group's record."""

    model: str
    slo_class: str
    token_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSeen:
    """The queue as it was right after the event `last_event`. `running`: incarnation -> requests that it owns."""

    last_event: EntryId
    instances: tuple[InstanceFacts, ...]
    running: Mapping[str, int]
    groups: Mapping[str, GroupClass]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Rows that somebody brought, which were checked: they replace those of the same keys."""

    snapshot: ProfileSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. `read_to`: an entry of the stream of which all events were given, if there were any."""

    read_to: EntryId = (0, 0)


Event = Lifecycle | ReportedOperation | QueueSeen | Imported | Predicted | Ended | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Store this snapshot, whose version is one above the last."""

    snapshot: ProfileSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareUnknown:
    """Log that nothing is known of a pair of GPUs and model, so that no instance of it is predicted or planned for."""

    instance: str
    gpu: str
    n_gpu: int
    model: str
    why: str


Effect = Publish | HardwareUnknown | Judged
