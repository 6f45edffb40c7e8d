"""What the shell tells the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from qlm_core.instance import InstanceFacts
from qlm_core.model import ModelSpec
from qlm_core.profile import ProfileSnapshot
from qlm_planner.board.snapshot import Arrival, EntryId, Snapshot
from qlm_planner.machine.effects import ApplyChunk, Call, Place, Regroup
from qlm_planner.search.problem import Orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesRead:
    """What is known of hardware and workload, and the models served. The first one must come before anything is placed."""

    catalogue: Mapping[str, ModelSpec]
    profiles: ProfileSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewRead:
    snapshot: Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class UnplacedRead:
    """A page of `ReadUnplaced`, in queue id order. `read_to`: the last queue id in it; "" for an empty one, which ends the scan."""

    arrivals: tuple[Arrival, ...]
    read_to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalsRead:
    arrivals: tuple[Arrival, ...]


class ChangeKind(Enum):
    """What a lifecycle event means for the counts of a group."""

    PULLED = auto()
    RETURNED = auto()
    """Unpulled or requeued: waiting again."""
    ENDED_RUNNING = auto()
    ENDED_WAITING = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One request of a group went on. `incarnation`: whose it was, "" if nobody's. `evicted`: it RETURNED because it gave way to the head,
    and stands behind that. `answered`: it RETURNED or ENDED_WAITING with its first token."""

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
    """`done`: for each request of the call, in its order, whether it is in the group; the others ended or are placed elsewhere."""

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
    """So many were failed."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """So many requests are in the other group, with so many prompt tokens and these deadlines."""

    call: Regroup
    count: int
    prompt_tokens: int
    first_deadline_s: float
    last_deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """The instance is forgotten, or was not to be: the next overview tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsPublished:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed:
    """The queue could not be asked, or did not answer in time: the call may or may not have happened."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceAnnounced:
    """An agent says that it registered."""

    facts: InstanceFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReported:
    """What an agent measures of itself. `active_model`: "" while none is loaded. `batch`: most requests that it runs at once, 0 where it
    does not say."""

    incarnation: str
    active_model: str
    warm_models: tuple[str, ...] = ()
    batch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanAsked:
    """Order all groups anew; answered by the `PlanChanged` that names the ask."""

    ask: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """The solver's answer to a job. `rule`: what made the orders."""

    job: int
    orders: Orders
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveFailed:
    """The solver has no answer: it raised, took too long, or its process is gone."""

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
"""The queue answered a call."""

Event = Tick | ProfilesRead | Answer | CallFailed | InstanceAnnounced | LoadReported | ReplanAsked | Solved | SolveFailed
