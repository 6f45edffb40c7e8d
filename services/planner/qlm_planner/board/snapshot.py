"""The queue as the machine reads it: the planner's own picture of `qlm_queue.values.Overview`, without its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from qlm_core.instance import InstanceFacts
from qlm_core.pauses import Pause
from qlm_core.reported_runs import RunsTold
from qlm_core.request import RequestFacts

EntryId = tuple[int, int]
"""A stream entry id "<ms>-<n>" as two numbers, which order as the stream does."""


def entry_id(text: str) -> EntryId:
    """Raises ValueError for what is not an entry id; "" and "0" come before all others."""
    ms, _, sequence = text.partition("-")
    return (int(ms or 0), int(sequence or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that waits for a group. `traceparent`, `tracestate`: of the stored request, for the placement's span."""

    facts: RequestFacts
    traceparent: str = ""
    tracestate: str = ""


class GroupRow(Protocol):
    """A group as the queue has it (`GroupRecord`)."""

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
    """A registered instance. `alive`: the lease of its incarnation holds. `runs`: as its agent reported them last, if it did."""

    facts: InstanceFacts
    alive: bool
    runs: RunsTold | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The queue but for its requests (`Overview`). `incarnations`: those that may own requests -> lease alive. `asked`: of the groups it
    has only these, as far as they exist; None: all. `pauses`: of models and tenants."""

    plan_version: int
    unplaced: int
    queues: tuple[QueueRow, ...]
    groups: Mapping[str, GroupRow]
    instances: tuple[InstanceRow, ...]
    incarnations: Mapping[str, bool]
    last_event_id: EntryId
    asked: tuple[str, ...] | None = None
    pauses: tuple[Pause, ...] = ()
