"""The planner's view of an overview of the queue (`qlm_queue.overview.Overview`), without wire formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from qlm_core.prediction.reported_runs import ReportedRuns
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.pauses import Pause
from qlm_core.vocabulary.request import RequestFacts
from qlm_core.vocabulary.stream import EntryId


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that waits for a group. `traceparent`, `tracestate`: for the placement's span."""

    facts: RequestFacts
    traceparent: str = ""
    tracestate: str = ""


class GroupRow(Protocol):
    """A group in the queue (`GroupRecord`)."""

    group_id: str
    instance: str
    last_instance: str
    waiting: int
    live: int
    waiting_prompt_tokens: int
    first_deadline_s: float
    next_deadline_s: float
    last_deadline_s: float
    slo_least_s: float
    meta: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """A virtual queue (`VirtualQueueRecord`)."""

    instance: str
    version: int
    group_ids: tuple[str, ...]
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRow:
    """A registered instance. `alive`: whether its incarnation's lease holds. `runs`: its agent's last report, if any."""

    facts: InstanceFacts
    alive: bool
    runs: ReportedRuns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The queue without its requests. `incarnations`: possible owners of requests -> lease alive. `group_ids`: of the groups that it
    holds, where they exist; None: all."""

    plan_version: int
    unplaced: int
    queues: tuple[QueueRow, ...]
    groups: Mapping[str, GroupRow]
    instances: tuple[InstanceRow, ...]
    incarnations: Mapping[str, bool]
    last_event_id: EntryId
    group_ids: tuple[str, ...] | None = None
    pauses: tuple[Pause, ...] = ()
