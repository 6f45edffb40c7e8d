"""Commands of planners on a `MemoryState`: place, regroup, apply_plan, reclaim, forget_instance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestState
from qlm_queue.memory.serving import return_failed
from qlm_queue.memory.state import MemoryState, StoredGroup, StoredQueue
from qlm_queue.memory.step import Step
from qlm_queue.values import (
    BATCH_MAX,
    PLANNER_ROLE,
    AppliedChunk,
    ControlKind,
    GroupPlacement,
    Lease,
    PlanChunk,
    RequestPlacement,
    RequeueCause,
    StepStatus,
    WaitingRequest,
)

ALIKE = ("model", "slo_kind")
"""Traits that two groups must share for a request to move from one to the other."""


def _check_leader(state: MemoryState, now_s: float, lease: Lease) -> None:
    """Raises LeaseLost unless this is the live lease of the planner."""
    state.check(Lease(role=PLANNER_ROLE, token=lease.token), now_s)


def place(
    state: MemoryState, now_s: float, lease: Lease, groups: Sequence[GroupPlacement], requests: Sequence[RequestPlacement]
) -> list[StepStatus]:
    placements = {placement.group_id: placement for placement in groups}
    for request in requests:
        if request.group_id not in placements:
            raise ValueError(f"group {request.group_id} of a request is not among the groups")
    _check_leader(state, now_s, lease)
    step = Step(state, now_s)
    statuses = [_place_one(step, placements[request.group_id], request) for request in requests]
    step.send()
    return statuses


def _place_one(step: Step, placement: GroupPlacement, wanted: RequestPlacement) -> StepStatus:
    state = step.state
    request = state.live(wanted.key, wanted.queue_id)
    if request is None:
        return StepStatus.STALE
    if request.state is not RequestState.ACCEPTED:
        waits_there = request.state is RequestState.PLACED and request.group_id == placement.group_id
        return StepStatus.DONE if waits_there else StepStatus.STALE
    group = _ready(step, placement)
    group.live += 1
    request.group_id, request.placed_s = group.group_id, step.now_s
    del state.unplaced[request.queue_id]
    step.join(group, request)
    return StepStatus.DONE


def _ready(step: Step, placement: GroupPlacement) -> StoredGroup:
    """The group of a placement: there and open, with the deadlines and the least SLO of the placement."""
    state = step.state
    group = state.groups.get(placement.group_id)
    if group is None:
        group = StoredGroup(group_id=placement.group_id, first_deadline_s=placement.first_deadline_s, meta={})
        state.groups[group.group_id] = group
    if group.instance:
        group.first_deadline_s = min(group.first_deadline_s, placement.first_deadline_s)
    else:
        group.first_deadline_s = placement.first_deadline_s
        group.meta = {**group.meta, **placement.meta}
        instance = placement.instance if placement.instance in state.queues else UNASSIGNED
        group_ids = state.queues[instance].group_ids
        at_end = not placement.before or placement.before not in group_ids
        step.open(group, instance, len(group_ids) if at_end else group_ids.index(placement.before))
    group.last_deadline_s = max(group.last_deadline_s, placement.last_deadline_s)
    group.slo_least_s = min(group.slo_least_s, placement.slo_least_s)
    return group


def regroup(
    state: MemoryState, now_s: float, lease: Lease, source: str, into: GroupPlacement, requests: Sequence[WaitingRequest]
) -> list[StepStatus]:
    if into.group_id == source:
        raise ValueError("the groups are one")
    _check_leader(state, now_s, lease)
    step = Step(state, now_s)
    alike = _alike(state, source, into)
    statuses = [_regroup_one(step, source, into, request, alike=alike) for request in requests]
    step.send()
    return statuses


def _alike(state: MemoryState, source: str, into: GroupPlacement) -> bool:
    """Requests of a group may wait in another one."""
    if source not in state.groups:
        return False
    from_meta = state.groups[source].meta
    others = [into.meta] + ([state.groups[into.group_id].meta] if into.group_id in state.groups else [])
    return all(from_meta.get(name, "") == meta.get(name, "") for name in ALIKE for meta in others)


def _regroup_one(step: Step, source: str, into: GroupPlacement, wanted: WaitingRequest, *, alike: bool) -> StepStatus:
    state = step.state
    request = state.live(wanted.key, wanted.queue_id)
    if request is None or request.state is not RequestState.PLACED:
        return StepStatus.STALE
    if request.group_id == into.group_id:
        return StepStatus.DONE
    if request.group_id != source or not alike:
        return StepStatus.STALE
    left = state.groups[source]
    group = _ready(step, into)
    instance = left.instance
    was_head = state.queues[instance].group_ids[0] == source
    step.leave(left, request)
    if was_head and not left.instance:
        state.send(step.now_s, instance, ControlKind.HEAD_CHANGED)
    left.live -= 1
    if left.live == 0:
        del state.groups[source]
    group.live += 1
    request.group_id = group.group_id
    step.join(group, request)
    return StepStatus.DONE


def apply_plan(state: MemoryState, now_s: float, lease: Lease, chunk: PlanChunk) -> AppliedChunk:
    named = [group_id for segment in chunk.segments for group_id in segment.group_ids]
    if len(named) > BATCH_MAX:
        raise ValueError(f"a chunk of {len(named)} groups: at most {BATCH_MAX}")
    if len(set(named)) < len(named):
        raise ValueError("a chunk names a group twice")
    _check_leader(state, now_s, lease)
    open_groups = {group_id: state.groups[group_id] for group_id in named if group_id in state.groups and state.groups[group_id].instance}
    if not _matches(state, chunk, open_groups.values()):
        return AppliedChunk(applied=False, versions=_versions(state, chunk.versions), moved=0)
    state.plan_version = chunk.plan_version
    before = {name: list(state.queues[name].group_ids) for name in chunk.versions if name in state.queues}
    was_on = {group_id: group.instance for group_id, group in open_groups.items()}
    step = Step(state, now_s)
    moved = 0
    for segment in chunk.segments:
        found = [group_id for group_id in segment.group_ids if group_id in open_groups]
        for group_id in found:
            group = open_groups[group_id]
            state.queues[group.instance].group_ids.remove(group_id)
            group.instance = group.last_instance = segment.instance
        state.queues[segment.instance].group_ids[segment.start : segment.start] = found
        arrived = [group_id for group_id in found if was_on[group_id] != segment.instance]
        if arrived:
            step.groups_moved(segment.instance, arrived)
            moved += len(arrived)
    step.send()
    for name, group_ids in sorted(before.items()):
        _note_change(state, now_s, name, group_ids)
    return AppliedChunk(applied=True, versions=_versions(state, chunk.versions), moved=moved)


def _matches(state: MemoryState, chunk: PlanChunk, groups: Iterable[StoredGroup]) -> bool:
    instances = [segment.instance for segment in chunk.segments]
    return (
        chunk.plan_version >= state.plan_version
        and all(state.queues.get(name, StoredQueue()).version == version for name, version in chunk.versions.items())
        and all(name in state.queues and name in chunk.versions for name in instances)
        and all(group.instance in chunk.versions for group in groups)
    )


def _versions(state: MemoryState, names: Mapping[str, int]) -> dict[str, int]:
    return {name: state.queues.get(name, StoredQueue()).version for name in names}


def _note_change(state: MemoryState, now_s: float, name: str, before: Sequence[str]) -> None:
    queue = state.queues[name]
    if list(before) != queue.group_ids:
        queue.version += 1
    if list(before[:1]) != queue.group_ids[:1]:
        state.send(now_s, name, ControlKind.HEAD_CHANGED)


def reclaim(state: MemoryState, now_s: float, lease: Lease, incarnation: str, failure: bytes) -> int:
    _check_leader(state, now_s, lease)
    if state.holder(incarnation, now_s) is not None or incarnation not in state.running:
        return 0
    lost = [request for _, request in sorted(state.running[incarnation].items(), reverse=True)][:BATCH_MAX]
    step = Step(state, now_s)
    for request in lost:
        return_failed(step, request, RequeueCause.LOST, failure, by="")
    step.send()
    if not lost:
        del state.running[incarnation]
    return len(lost)


def shed(state: MemoryState, now_s: float, lease: Lease, group_id: str, keep: int, count: int, oldest: bool, failure: bytes) -> int:
    _check_leader(state, now_s, lease)
    group = state.groups.get(group_id)
    waiting = [] if group is None else sorted(group.members)
    most = max(0, min(count, len(waiting) - keep))
    chosen = waiting[:most] if oldest else waiting[::-1][:most]
    step = Step(state, now_s)
    for number in chosen:
        step.finish(state.by_number[number], RequestState.FAILED, failure)
    step.send()
    return len(chosen)


def forget_instance(state: MemoryState, now_s: float, lease: Lease, instance: str) -> bool:
    _check_leader(state, now_s, lease)
    registered = state.instances.get(instance)
    if registered is None or state.holder(registered.incarnation, now_s) is not None:
        return False
    if state.running.get(registered.incarnation) or state.queues[instance].group_ids:
        return False
    state.running.pop(registered.incarnation, None)
    del state.instances[instance], state.queues[instance]
    state.control.pop(instance, None)
    return True
