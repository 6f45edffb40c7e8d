"""Events of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.stream import EntryId
from qlm_planner.board.slot import NO_LOAD, EngineLoad
from qlm_planner.board.snapshot import Arrival, Snapshot
from qlm_planner.machine.effects import ApplyChunk, Call, Place, Regroup
from qlm_planner.search.problem import Orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesRead:
    """Profiles and served models. The first one precedes all placements."""

    catalogue: Mapping[str, ModelSpec]
    profiles: ProfileSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewRead:
    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class UnplacedRead:
    """A page of `ReadUnplaced`, by queue id. `read_to`: its last queue id; "" for an empty page, which ends the scan."""

    arrivals: tuple[Arrival, ...]
    read_to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalsRead:
    arrivals: tuple[Arrival, ...]


class ChangeKind(Enum):
    """Effect of a lifecycle event on a group's counts."""

    PULLED = auto()
    RETURNED = auto()
    """Unpulled or requeued: it waits again."""
    ENDED_RUNNING = auto()
    ENDED_WAITING = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one request. `incarnation`: its owner, "" for none. `evicted`: it RETURNED by eviction, behind the head. `answered`: it
    RETURNED or ENDED_WAITING with its first token."""

    kind: ChangeKind
    group_id: str
    incarnation: str
    prompt_tokens: int
    evicted: bool = False
    answered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EventEntry:
    """The changes of one script call."""

    entry_id: EntryId
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsRead:
    entries: tuple[EventEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceAnswered:
    """`done`: for each request of the call, whether it is in the group; the others have ended or are placed elsewhere."""

    call: Place
    done: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAnswered:
    call: ApplyChunk
    applied: bool
    versions: Mapping[str, int]
    moved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed:
    incarnation: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirySwept:
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShedAnswered:
    """The number of failed requests."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """The number of moved requests, their prompt tokens and deadlines."""

    call: Regroup
    count: int
    prompt_tokens: int
    first_deadline_s: float
    last_deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """The call to forget an instance is done; the next overview has the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsPublished:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed:
    """No answer to a call within its deadline: it may or may not have happened."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceAnnounced:
    """An agent has registered."""

    facts: InstanceFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReported:
    """An agent's report. `active_model`: "" while none is loaded. `batch`: most requests that run at once, 0 if unknown."""

    incarnation: str
    active_model: str
    warm_models: tuple[str, ...] = ()
    batch: int = 0
    engine: EngineLoad = NO_LOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanRequested:
    """Order all groups anew; answered by the `PlanChanged` that holds `number`."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """The solver's answer to a job. `rule` made the orders."""

    job: int
    orders: Orders
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveFailed:
    """The solver has no answer: it raised, timed out, or its process died."""

    job: int
    reason: str


Answer = (
    OverviewRead
    | UnplacedRead
    | ArrivalsRead
    | EventsRead
    | PlaceAnswered
    | ChunkAnswered
    | Reclaimed
    | ExpirySwept
    | ShedAnswered
    | Regrouped
    | Forgotten
    | WaitsPublished
)
"""Answers of the queue to calls."""

Event = Tick | ProfilesRead | Answer | CallFailed | InstanceAnnounced | LoadReported | ReplanRequested | Solved | SolveFailed
