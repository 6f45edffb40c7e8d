"""The state of a queue as planner, estimator and gateways read it. Times are seconds of the server's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlm_core.vocabulary.pauses import Pause
from qlm_queue.bounds import Bounds as Bounds
from qlm_queue.values import WAITS_BYTES_MAX, GroupRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRecord:
    """A registered instance. `body`: the serialized api `Instance`. `alive`: its lease holds."""

    name: str
    incarnation: str
    alive: bool
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualQueueRecord:
    """`group_ids`: first is served first. `running`: requests that the registered incarnation owns. `version` grows by one with each group
    that is opened on the queue and with each chunk of a plan that changes it, not when a group drains."""

    instance: str
    version: int
    group_ids: Sequence[str]
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsRecord:
    """The waits that the planner published last (b"": none), with the requests that were ever accepted, those that live, and the pauses by
    kind and name."""

    body: bytes
    accepted_count: int
    live: int
    pauses: Sequence[Pause] = ()


def check_waits(body: bytes) -> bytes:
    """Raises ValueError for more than `WAITS_BYTES_MAX` bytes."""
    if len(body) > WAITS_BYTES_MAX:
        raise ValueError(f"published waits have at most {WAITS_BYTES_MAX} bytes, not {len(body)}")
    return body


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The whole queue, without requests and groups that the caller left out, read in one step. `incarnations`: those that may own
    requests -> lease alive.
    `last_event_id`: events after it hold later changes. `damage_count`: damaged records that repairs have mended, ever. `pauses`: by
    kind and name."""

    plan_version: int
    accepted_count: int
    live: int
    unplaced: int
    virtual_queues: Sequence[VirtualQueueRecord]
    groups: Mapping[str, GroupRecord]
    instances: Sequence[InstanceRecord]
    incarnations: Mapping[str, bool]
    last_event_id: str
    damage_count: int = 0
    pauses: Sequence[Pause] = ()
