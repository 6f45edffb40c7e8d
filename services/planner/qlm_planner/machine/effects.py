"""Effects of the machine. Each call is answered by exactly one event of `events`, or by `CallFailed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from qlm_core.prediction.planned_waits import PlannedWaits
from qlm_planner.board.snapshot import Arrival
from qlm_planner.search.problem import Orders, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpening:
    """A group that a placement may have to open (`qlm_queue.values.GroupPlacement`)."""

    group_id: str
    instance: str
    before: str
    first_deadline_s: float
    meta: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One request for one of the groups of the same call."""

    arrival: Arrival
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Put requests into groups; the whole call may be repeated safely."""

    groups: tuple[GroupOpening, ...]
    requests: tuple[Placement, ...]
    opened: tuple[str, ...] = ()
    """Queues of the groups that the call opens, one for each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of groups for one virtual queue (`qlm_queue.values.QueueSegment`)."""

    instance: str
    start: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyChunk:
    """Move whole groups if the queues still have these versions (`qlm_queue.values.PlanChunk`)."""

    plan_version: int
    versions: Mapping[str, int]
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOverview:
    """Read the queue with these groups, or with all (None)."""

    group_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadUnplaced:
    """Read accepted, unplaced requests after a queue id."""

    after: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadArrivals:
    """Wait for requests that no planner has read."""

    count: int
    block_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEvents:
    """Wait for lifecycle events after an entry id "<ms>-<n>"."""

    after: str
    count: int
    block_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Reclaim the requests of an incarnation without a lease."""

    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """End requests whose expiry has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """Fail up to `count` waiting requests of a group, its `oldest` or its newest ones, and keep at least `keep`."""

    group_id: str
    keep: int
    count: int
    oldest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """Move the last `count` waiting requests of the group `source`, beyond the first `keep`, to another one
    (`qlm_queue.port.Queue.regroup`). `into`: its deadline is that of the moved requests."""

    source: str
    keep: int
    count: int
    into: GroupOpening


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Forget a lost instance."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishWaits:
    """Write the predicted waits."""

    waits: PlannedWaits


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsFailed:
    """The waits could not be predicted; no answer."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanged:
    """The plan has changed; no answer. `replans`: answered `ReplanRequested.number` -> groups moved."""

    plan_version: int
    replans: Mapping[int, int]


class PlanCause(StrEnum):
    """Cause of a change of the plan."""

    RELOCATE = "relocate"
    """Groups must move: their instance left, drains or lacks the model, or a new instance has it."""
    MISS = "miss"
    """Late requests are predicted."""
    JOINED = "joined"
    """A new instance serves."""
    LEFT = "left"
    """An instance is lost, or drains."""
    DRIFT = "drift"
    """An instance's learned speed has changed."""
    NEW_GROUP = "new_group"
    """A group opened; the order around it is repaired."""
    IDLE = "idle"
    """An instance is idle while another one has several groups."""
    RANKED = "ranked"
    """Groups have waited too long, or a tenant's share has crossed its limit."""
    EVICTED = "evicted"
    """Evicted groups move behind others of the head's model."""
    ASKED = "asked"
    """`Planner.Replan` was called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanApplied:
    """A change of the plan is written, as a whole or (not `whole`) up to the next overview; no answer. `began_s`: its decision.
    `groups_named`: in its chunks; `groups_moved`: to another queue, from the queues `sources` to `destinations`. `late_before`: late
    requests expected before it."""

    cause: PlanCause
    whole: bool
    began_s: float
    plan_version: int
    chunks: int
    groups_named: int
    groups_moved: int
    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    late_before: float


class Stage(StrEnum):
    """Depth of a search."""

    REPAIR = "repair"
    """A few moves from the present order."""
    REPLAN = "replan"
    """A whole order, constructed and annealed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solve:
    """Search a better order in the background; answered by `Solved` or `SolveFailed`. A job with a higher number replaces one under way.
    `orders`: the start of a repair, None for a replan. `moves`: bound of the search. The answer is a function of these fields."""

    job: int
    stage: Stage
    problem: Problem
    orders: Orders | None
    moves: int
    seed: int


class Outcome(StrEnum):
    """Result of a solver's job."""

    APPLIED = "applied"
    """Its plan is written."""
    KEPT = "kept"
    """Its plan does not save the margin; the present plan stays."""
    FAILED = "failed"
    """It has no answer; the present plan stays, and new groups are inserted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """A solver's job has ended; no answer. `gain`: saved cost on the board at the answer. For people: `reason` of a failure, and `rule`
    that made the order."""

    job: int
    stage: Stage
    cause: PlanCause
    outcome: Outcome
    began_s: float
    groups: int
    moves: int
    gain: float = 0.0
    rule: str = ""
    reason: str = ""


Call = (
    Place | ApplyChunk | ReadOverview | ReadUnplaced | ReadArrivals | ReadEvents | Reclaim | Expire | Shed | Regroup | Forget | PublishWaits
)
"""Effects that are calls to the queue."""

Effect = Call | PlanChanged | PlanApplied | Solve | JobEnded | WaitsFailed
