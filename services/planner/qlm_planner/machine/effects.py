"""What the machine asks of its shell. Every call is answered by exactly one event of `events`, or by `CallFailed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from qlm_core.planned_waits import PlannedWaits
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
    """Put these requests into these groups; a repeat of the whole call is safe."""

    groups: tuple[GroupOpening, ...]
    requests: tuple[Placement, ...]
    opened: tuple[str, ...] = ()
    """Queues of the groups that the call opens, one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of groups for one virtual queue (`qlm_queue.values.QueueSegment`)."""

    instance: str
    start: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyChunk:
    """Move whole groups, if the versions still are these (`qlm_queue.values.PlanChunk`)."""

    plan_version: int
    versions: Mapping[str, int]
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOverview:
    """Read the queue; of its groups these, or all of them (None)."""

    group_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadUnplaced:
    """Read accepted requests that are not placed, after a queue id."""

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
    """Take what an incarnation owns whose lease is gone."""

    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """End requests whose expiry has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """Fail up to `count` requests that wait in a group, the `oldest` or the newest of them, so that `keep` or more are left."""

    group_id: str
    keep: int
    count: int
    oldest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """Take requests that wait in the group `source` to another one (`qlm_queue.port.Queue.regroup`): the last `count`, as long as `keep`
    are left. `into`: its deadline is that of what goes there."""

    source: str
    keep: int
    count: int
    into: GroupOpening


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Forget an instance that is gone."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishWaits:
    """Write the waits that the plan predicts."""

    waits: PlannedWaits


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsFailed:
    """The waits of the plan could not be predicted; no answer."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanged:
    """The plan is another one now; no answer. `replans`: the asks of `ReplanAsked` that it answers -> groups moved."""

    plan_version: int
    replans: Mapping[int, int]


class PlanCause(StrEnum):
    """Why the plan was changed."""

    RELOCATE = "relocate"
    """Groups stood where nobody serves them: their instance left, drains or does not have the model, or one joined that does."""
    MISS = "miss"
    """Requests were predicted to be late."""
    JOINED = "joined"
    """There is a new instance."""
    LEFT = "left"
    """An instance was lost, or drains."""
    DRIFT = "drift"
    """An instance was found to run otherwise than it did."""
    NEW_GROUP = "new_group"
    """A group came; the order around it is looked at again."""
    IDLE = "idle"
    """An instance had nothing to do beside one with several groups."""
    RANKED = "ranked"
    """Groups had waited too long, or their tenant had had too much or not any more."""
    EVICTED = "evicted"
    """Groups gave way to a head, and stood in the way of others behind it."""
    ASKED = "asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanApplied:
    """A change of the plan is in the queue, wholly or (`whole`) as far as it came before the queue was looked at again; no answer.
    `began_s`: when it was decided on. `groups_named`: written in its chunks; `groups_moved`: those of them that are on another queue than
    before, of the queues `sources`, on the queues `destinations`. `late_before`: late requests expected before it."""

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
    """How thoroughly the solver looks."""

    REPAIR = "repair"
    """From the order as it is, a few moves."""
    REPLAN = "replan"
    """A whole order, constructed and annealed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solve:
    """Look for a better order, beside everything else; answered by `Solved` or `SolveFailed`. A job with a higher number takes the place
    of one that is under way. `orders`: where a repair starts, None for a replan. `moves` bound the search. A function of these fields
    alone."""

    job: int
    stage: Stage
    problem: Problem
    orders: Orders | None
    moves: int
    seed: int


class Outcome(StrEnum):
    """What became of a job of the solver."""

    APPLIED = "applied"
    """Its plan is being written."""
    KEPT = "kept"
    """Its plan is not better than the one in force by the margin."""
    FAILED = "failed"
    """There is no answer; the plan in force stays, and new groups are inserted into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """A job of the solver is over; no answer. `gain`: of the plan's cost, by the model of queues, on the board as it was then. For
    people: `reason`, why it failed, and `rule`, what made the order."""

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
