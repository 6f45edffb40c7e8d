"""Commands of gateways on a `MemoryState`: accept, attach, cancel, erase, expire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qlm.api.v1.request_pb2 import Request
from qlm.internal.v1.events_pb2 import EventKind
from qlm_core.vocabulary.errors import NotFound, OffsetOutOfRange, RequestIdConflict
from qlm_core.vocabulary.instance import instance_of
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.bounds import RECORD_BYTES, bytes_full, requests_full, with_name
from qlm_queue.damage import DAMAGED_RESULT
from qlm_queue.memory.state import MemoryState, StoredRequest
from qlm_queue.memory.step import Step
from qlm_queue.values import BATCH_MAX, Acceptance, AcceptReceipt, Attached, ControlKind, LiveRequest, TerminalRecord


def accept(state: MemoryState, now_s: float, acceptance: Acceptance) -> AcceptReceipt:
    key = acceptance.key
    known = find(state, now_s, key)
    if known is not None:
        return _duplicate(state, acceptance, known)
    _check_bounds(state, now_s, acceptance)
    state.accepted_count += 1
    request = StoredRequest(
        queue_id=state.next_queue_id(now_s),
        key=key,
        number=state.accepted_count,
        accepted_s=now_s,
        digest=acceptance.digest,
        body=acceptance.body,
        model=Request.FromString(acceptance.body).model,
        slo_class=acceptance.slo_class,
        prompt_tokens=acceptance.prompt_tokens,
        gateway=acceptance.gateway,
        expiry_s=None if acceptance.expire_after_s is None else now_s + acceptance.expire_after_s,
    )
    state.requests[request.queue_id] = state.by_key[key] = state.by_number[request.number] = request
    state.unplaced[request.queue_id] = request
    state.unread.append(request.queue_id)
    state.written.add(("arrivals", ""))
    state.add_expiry(request)
    state.live_by_tenant[key.tenant] += 1
    state.live_by_class[request.slo_class] += 1
    state.count_bytes(key.tenant, request.slo_class, request.held_bytes)
    step = Step(state, now_s)
    step.event(EventKind.EVENT_KIND_ACCEPTED, request)
    step.send()
    return AcceptReceipt(
        queue_id=request.queue_id, acceptance_number=request.number, accepted_s=now_s, state=RequestState.ACCEPTED, duplicate=False
    )


def _duplicate(state: MemoryState, acceptance: Acceptance, known: LiveRequest | TerminalRecord) -> AcceptReceipt:
    number, accepted_s = 0, 0.0
    if isinstance(known, TerminalRecord):
        digest = known.digest
    else:
        digest = state.by_key[acceptance.key].digest
        number, accepted_s = known.acceptance_number, known.accepted_s
    if digest != acceptance.digest:
        raise RequestIdConflict(f"request id {acceptance.key.request_id} stands for another request")
    return AcceptReceipt(queue_id=known.queue_id, acceptance_number=number, accepted_s=accepted_s, state=known.state, duplicate=True)


def _check_bounds(state: MemoryState, now_s: float, acceptance: Acceptance) -> None:
    bounds, tenant, slo_class = state.bounds, acceptance.key.tenant, acceptance.slo_class
    live = {"queue": len(state.requests), "tenant": state.live_by_tenant[tenant], "class": state.live_by_class[slo_class]}
    for bound, limit in (("queue", bounds.queue_max), ("tenant", bounds.tenant_max), ("class", bounds.class_max)):
        if live[bound] >= limit:
            raise with_name(requests_full(bound, limit), tenant, slo_class)
    state.forget_old(now_s)
    for bound, held, limit in (
        ("queue", state.held_total, bounds.queue_bytes_max),
        ("tenant", state.held_by_tenant[tenant], bounds.tenant_bytes_max),
        ("class", state.held_by_class[slo_class], bounds.class_bytes_max),
    ):
        if limit and held + RECORD_BYTES + len(acceptance.body) > limit:
            frees_after_s = None
            if len(state.terminals) > live[bound]:
                frees_after_s = next(iter(state.terminals.values())).expires_s - now_s
            raise with_name(bytes_full(bound, limit, held, frees_after_s), tenant, slo_class)


def not_found(key: RequestKey) -> NotFound:
    return NotFound("no such request", details={"tenant": key.tenant, "request_id": key.request_id})


def find(state: MemoryState, now_s: float, key: RequestKey) -> LiveRequest | TerminalRecord | None:
    request = state.by_key.get(key)
    return state.terminal(key, now_s) if request is None else request.as_live()


def attach(state: MemoryState, now_s: float, key: RequestKey, gateway: str, offset: int) -> Attached:
    if offset < 0:
        raise OffsetOutOfRange("an offset is at least 0", details={"offset": str(offset)})
    request = state.by_key.get(key)
    ended = state.terminal(key, now_s) if request is None else None
    if request is None and ended is None:
        raise not_found(key)
    progress = bytes(request.progress) if request is not None else state.terminals[key].progress
    if offset > len(progress):
        raise OffsetOutOfRange(
            f"offset {offset} is beyond the {len(progress)} bytes produced", details={"offset": str(offset), "produced": str(len(progress))}
        )
    if request is not None and gateway not in ("", request.gateway):
        request.gateway = gateway
        if request.state is RequestState.RUNNING:
            instance = instance_of(request.incarnation)
            state.send(now_s, instance, ControlKind.GATEWAY_REBOUND, request.queue_id, request.attempt)
    live = None if request is None else replace(request.as_live(), body=Request(model=request.model).SerializeToString())
    logprobs = b"" if request is None else request.logprobs_from(offset)
    return Attached(ended=ended, live=live, progress=progress[offset:], produced=len(progress), logprobs=logprobs)


def cancel(state: MemoryState, now_s: float, key: RequestKey, result: bytes) -> RequestState:
    request = state.by_key.get(key)
    if request is None:
        ended = state.terminal(key, now_s)
        if ended is None:
            raise not_found(key)
        return ended.state
    step = Step(state, now_s)
    step.finish(request, RequestState.CANCELLED, result)
    step.send()
    return RequestState.CANCELLED


def erase(state: MemoryState, now_s: float, key: RequestKey, result: bytes) -> RequestState:
    end = cancel(state, now_s, key, result)
    state.forget(key)
    return end


def condemn(state: MemoryState, now_s: float, queue_ids: Sequence[str]) -> int:
    step = Step(state, now_s)
    found = [state.requests[queue_id] for queue_id in queue_ids if queue_id in state.requests]
    for request in found:
        step.finish(request, RequestState.FAILED, DAMAGED_RESULT)
    step.send()
    state.damage_count += len(found)
    return len(found)


def expire(state: MemoryState, now_s: float, result: bytes) -> int:
    step = Step(state, now_s)
    due = [number for expiry_s, number in state.expiries[:BATCH_MAX] if expiry_s <= now_s]
    for number in due:
        step.finish(state.by_number[number], RequestState.EXPIRED, result)
    step.send()
    return len(due)
