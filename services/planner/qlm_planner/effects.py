"""What the machine asks of its shell. Every call is answered by exactly one event of `events.py`, or by `CallFailed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qlm_planner.snapshot import Arrival


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
    """Read the whole queue."""


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
class Forget:
    """Forget an instance that is gone."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanged:
    """The plan is another one now; no answer. `replans`: the asks of `ReplanAsked` that it answers -> groups moved."""

    plan_version: int
    replans: Mapping[int, int]


Call = Place | ApplyChunk | ReadOverview | ReadUnplaced | ReadArrivals | ReadEvents | Reclaim | Expire | Forget
"""Effects that are calls to the queue."""

Effect = Call | PlanChanged
