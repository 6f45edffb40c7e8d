"""Commands of agents on a `MemoryState`: pull, emit, complete, unpull, requeue."""

from __future__ import annotations

from collections.abc import Sequence

from qlm.internal.v1.events_pb2 import EventKind, RequestEvent
from qlm.internal.v1.frames_pb2 import Frame
from qlm_core.vocabulary.errors import LeaseLost
from qlm_core.vocabulary.instance import UNASSIGNED, instance_of
from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestState
from qlm_queue.expired import EXPIRED_RESULT
from qlm_queue.memory.state import MemoryState, StoredGroup, StoredRequest
from qlm_queue.memory.step import Step
from qlm_queue.operator_values import HELD_BACK_MAX
from qlm_queue.values import (
    BATCH_MAX,
    Completion,
    Emission,
    GroupBehind,
    HeadGroup,
    Lease,
    Owned,
    PullBudget,
    Pulled,
    PullResult,
    RequeueCause,
    StepStatus,
)


def pull(state: MemoryState, now_s: float, lease: Lease, model: str, budget: PullBudget) -> PullResult:
    state.check(lease, now_s)
    incarnation = lease.role
    instance = instance_of(incarnation)
    if instance not in state.instances or state.instances[instance].incarnation != incarnation:
        raise LeaseLost(f"{incarnation} is not the registered incarnation of {instance}")
    step = Step(state, now_s)
    held_back = HELD_BACK_MAX
    idle = len(state.running[incarnation]) <= budget.owned_aside
    group_ids = state.queues[instance].group_ids
    pulled: list[Pulled] = []
    tokens_left = budget.kv_tokens
    blocked_tokens = 0
    suspect = False
    looked_at = 0
    while True:
        held_back = _clear_head(step, instance, held_back)
        if not model or not group_ids or len(pulled) >= budget.requests_max or looked_at >= BATCH_MAX:
            break
        group = state.groups[group_ids[0]]
        if group.model != model:
            break
        request = state.by_number[group.members[0]]
        looked_at += 1
        if (PauseKind.TENANT, request.key.tenant) in state.paused:
            break  # the rest is for the next call
        if request.expiry_s is not None and request.expiry_s <= now_s:
            step.finish(request, RequestState.EXPIRED, EXPIRED_RESULT)
            continue
        needed = request.prompt_tokens + request.produced_tokens + budget.output_reserve_tokens
        alone = idle or (budget.suspects and request.failed_attempts == 1)
        suspect = request.failed_attempts > 0 and (bool(pulled) or not alone)
        if suspect or (needed > tokens_left and (pulled or not idle)):
            blocked_tokens = needed
            break
        tokens_left -= needed
        pulled.append(_take(step, group, request, incarnation))
        if request.failed_attempts:
            break
    _clear_head(step, instance, held_back)
    step.send()
    first = [state.groups[group_id] for group_id in group_ids[: 1 + min(budget.behind_max, BATCH_MAX)]]
    return PullResult(
        pulled=pulled,
        head=_head(state, first[0]) if first else None,
        blocked_tokens=blocked_tokens,
        suspect=suspect,
        behind=tuple(
            GroupBehind(
                model=group.model,
                slo_class=group.meta.get("slo_class", ""),
                slo_kind=group.meta.get("slo_kind", ""),
                waiting=len(group.members),
                first_deadline_s=group.first_deadline_s,
            )
            for group in first[1:]
        ),
    )


def _clear_head(step: Step, instance: str, held_back: int) -> int:
    """Takes what is paused away from the head of a virtual queue, and of paused tenants at most `held_back` requests; how many are left of
    these."""
    state = step.state
    queue = state.queues[instance]
    for _ in range(BATCH_MAX if state.paused else 0):
        if not queue.group_ids:
            break
        group = state.groups[queue.group_ids[0]]
        first = state.by_number[group.members[0]]
        if (PauseKind.MODEL, group.model) in state.paused:
            _leave_unassigned(step, instance, group)
        elif held_back and (PauseKind.TENANT, first.key.tenant) in state.paused:
            _hold_back(step, first)
            held_back -= 1
        else:
            break
    return held_back


def _leave_unassigned(step: Step, instance: str, group: StoredGroup) -> None:
    queues = step.state.queues
    queues[instance].group_ids.pop(0)
    queues[UNASSIGNED].group_ids.append(group.group_id)
    queues[instance].version += 1
    queues[UNASSIGNED].version += 1
    group.instance = group.last_instance = UNASSIGNED
    step.groups_moved(UNASSIGNED, [group.group_id])


def _hold_back(step: Step, request: StoredRequest) -> None:
    """A waiting request of a paused tenant waits to be placed again."""
    group = step.state.groups[request.group_id]
    step.event(EventKind.EVENT_KIND_UNPLACED, request)
    step.leave(group, request)
    group.live -= 1
    if not group.live:
        del step.state.groups[group.group_id]
    step.unplace(request)


def _head(state: MemoryState, group: StoredGroup) -> HeadGroup:
    return HeadGroup(
        group_id=group.group_id,
        model=group.model,
        waiting=len(group.members),
        waiting_prompt_tokens=group.waiting_prompt_tokens,
        first_deadline_s=state.next_deadline_s(group),
        meta=dict(group.meta),
    )


def _take(step: Step, group: StoredGroup, request: StoredRequest, incarnation: str) -> Pulled:
    step.leave(group, request)
    request.state = RequestState.RUNNING
    request.incarnation = incarnation
    request.attempt += 1
    request.started_s = request.started_s or step.now_s
    step.state.running[incarnation][request.number] = request
    extra = RequestEvent(model=group.model).SerializeToString()
    step.event(EventKind.EVENT_KIND_PULLED, request, incarnation=incarnation, extra=extra)
    return as_pulled(request)


def as_pulled(request: StoredRequest) -> Pulled:
    return Pulled(
        queue_id=request.queue_id,
        key=request.key,
        group_id=request.group_id,
        acceptance_number=request.number,
        accepted_s=request.accepted_s,
        attempt=request.attempt,
        failed_attempts=request.failed_attempts,
        gateway=request.gateway,
        body=request.body,
        progress=bytes(request.progress),
        text=request.text,
        logprobs=bytes(request.logprobs),
    )


def _owned(state: MemoryState, incarnation: str, named: Owned | Emission) -> StoredRequest | None:
    """The request that the caller names, if it owns it by incarnation and attempt."""
    request = state.live(named.key, named.queue_id)
    if request is None or request.state is not RequestState.RUNNING:
        return None
    return request if (request.incarnation, request.attempt) == (incarnation, named.attempt) else None


def _append(step: Step, request: StoredRequest, emission: Emission) -> int:
    """Stores what is new of an emission that leaves no gap; returns the bytes of output that were new."""
    held = request.held_bytes
    new = emission.progress[len(request.progress) - emission.offset :]
    if new and not request.progress:
        request.first_token_s, request.text = step.now_s, emission.text
    request.progress += new
    if new and emission.logprobs:
        request.logprobs += emission.logprobs[-len(new) * len(emission.logprobs) // len(emission.progress) :]
    step.state.count_bytes(request.key.tenant, request.slo_class, request.held_bytes - held)
    return len(new)


def emit(state: MemoryState, now_s: float, incarnation: str, emissions: Sequence[Emission]) -> list[StepStatus]:
    step = Step(state, now_s)
    statuses = [_emit_one(step, incarnation, emission) for emission in emissions]
    step.send()
    return statuses


def _emit_one(step: Step, incarnation: str, emission: Emission) -> StepStatus:
    request = _owned(step.state, incarnation, emission)
    if request is None:
        return StepStatus.STALE
    if emission.offset > len(request.progress):
        return StepStatus.GAP
    if _append(step, request, emission) and emission.frame and request.gateway:
        step.frame(request.gateway, Frame.FromString(emission.frame))
    return StepStatus.DONE


def complete(state: MemoryState, now_s: float, incarnation: str, completions: Sequence[Completion]) -> list[StepStatus]:
    for completion in completions:
        if completion.state not in (RequestState.COMPLETED, RequestState.FAILED):
            raise ValueError(f"an agent ends a request as COMPLETED or FAILED, not {completion.state.name}")
    step = Step(state, now_s)
    statuses = [_complete_one(step, incarnation, completion) for completion in completions]
    step.send()
    return statuses


def _complete_one(step: Step, incarnation: str, completion: Completion) -> StepStatus:
    last = completion.last
    request = _owned(step.state, incarnation, last)
    if request is None:
        return _repeated(step, incarnation, completion)
    if last.offset > len(request.progress):
        return StepStatus.GAP
    _append(step, request, last)
    step.finish(request, completion.state, completion.result, by=incarnation, frame=last.frame, extra=completion.event)
    return StepStatus.DONE


def _repeated(step: Step, incarnation: str, completion: Completion) -> StepStatus:
    """Status of a completion whose request has ended: DONE if it ended it itself."""
    last = completion.last
    if step.state.by_key.get(last.key) is not None or step.state.terminal(last.key, step.now_s) is None:
        return StepStatus.STALE
    ended = step.state.terminals[last.key]
    found = (ended.record.queue_id, ended.record.attempt, ended.record.state, ended.incarnation)
    return StepStatus.DONE if found == (last.queue_id, last.attempt, completion.state, incarnation) else StepStatus.STALE


def unpull(state: MemoryState, now_s: float, incarnation: str, requests: Sequence[Owned], *, behind_head: bool) -> list[StepStatus]:
    step = Step(state, now_s)
    statuses = []
    for named in requests:
        request = _owned(state, incarnation, named)
        if request is not None:
            if not request.first_token_s:
                request.started_s = 0.0  # it was not started
            step.return_to_place(request, int(behind_head))
            step.event(EventKind.EVENT_KIND_UNPULLED, request, incarnation=incarnation)
        statuses.append(StepStatus.STALE if request is None else StepStatus.DONE)
    step.send()
    return statuses


def requeue(
    state: MemoryState, now_s: float, incarnation: str, requests: Sequence[Owned], cause: RequeueCause, failure: bytes
) -> list[StepStatus]:
    step = Step(state, now_s)
    statuses = []
    for named in requests:
        request = _owned(state, incarnation, named)
        statuses.append(StepStatus.STALE if request is None else return_failed(step, request, cause, failure, by=incarnation))
    step.send()
    return statuses


def return_failed(step: Step, request: StoredRequest, cause: RequeueCause, failure: bytes, *, by: str) -> StepStatus:
    """Requeues one running request, or ends it where this was its last attempt. `by` as in `Step.finish`."""
    bounds = step.state.bounds
    request.failed_attempts += cause is RequeueCause.FAILED
    if cause is RequeueCause.SUSPECTED:
        request.failed_attempts = min(request.failed_attempts + 1, bounds.attempts_max - 1)
    lost_too_often = cause is RequeueCause.LOST and request.attempt >= bounds.pulls_max
    if lost_too_often or request.failed_attempts >= bounds.attempts_max:
        step.finish(request, RequestState.FAILED, failure, by=by)
        return StepStatus.ENDED
    owner = request.incarnation
    step.return_to_place(request, 1 if cause is RequeueCause.EVICTED else 0)
    step.event(EventKind.EVENT_KIND_REQUEUED, request, incarnation=owner, cause=cause.value)
    return StepStatus.DONE
