"""The whole state of a memory twin as a `QueueDump`."""

from __future__ import annotations

from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.memory.state import MemoryState, StoredGroup, StoredRequest
from qlm_queue.values import TerminalRecord
from queue_dump import GroupDump, InstanceDump, QueueDump, RequestDump, TerminalDump, VirtualQueueDump


def dump_memory(queue: MemoryQueue) -> QueueDump:
    """All of the state; see `QueueDump`."""
    state, now_s = queue.state, queue._now_s()
    ended = {key: state.terminal(key, now_s) for key in list(state.terminals)}
    frame_streams = {gateway: state.frames_of(gateway, now_s) for gateway in sorted(state.frames)}
    held = {role: state.holder(role, now_s) for role in sorted(state.leases)}
    return QueueDump(
        accepted_count=state.accepted_count,
        plan_version=state.plan_version,
        requests=tuple(_request_dump(request) for request in state.requests.values()),
        groups=tuple(_group_dump(state, group) for _, group in sorted(state.groups.items())),
        virtual_queues=tuple(
            VirtualQueueDump(instance=name, version=queue.version, group_ids=tuple(queue.group_ids))
            for name, queue in sorted(state.queues.items())
        ),
        running={name: tuple(r.queue_id for r in owned.values()) for name, owned in sorted(state.running.items()) if owned},
        incarnations=tuple(sorted(state.running)),
        instances=tuple(
            InstanceDump(name=name, incarnation=record.incarnation, body=record.body) for name, record in sorted(state.instances.items())
        ),
        leases={role: (lease.token, lease.address) for role, lease in held.items() if lease is not None},
        live_total=len(state.requests),
        live_by_tenant={name: live for name, live in sorted(state.live_by_tenant.items()) if live},
        live_by_class={name: live for name, live in sorted(state.live_by_class.items()) if live},
        held_total=state.held_total,
        held_by_tenant={name: held for name, held in sorted(state.held_by_tenant.items()) if held},
        held_by_class={name: held for name, held in sorted(state.held_by_class.items()) if held},
        kept={each.record.queue_id: (key.tenant, each.slo_class, each.held_bytes) for key, each in state.terminals.items()},
        arrivals_pending=tuple(request.queue_id for request in state.unplaced_in_order() if request.read),
        arrivals_unread=tuple(request.queue_id for request in state.unplaced_in_order() if not request.read),
        terminals=tuple(
            TerminalDump(key=key, **{name: getattr(record, name) for name in TerminalRecord.__slots__})
            for key, record in sorted(ended.items())
            if record is not None
        ),
        frames={gateway: stream.payloads() for gateway, stream in frame_streams.items() if stream is not None},
        control={instance: stream.payloads() for instance, stream in sorted(state.control.items())},
        events=state.events.payloads(),
        profiles=state.profiles,
        waits=state.waits,
    )


def _request_dump(request: StoredRequest) -> RequestDump:
    return RequestDump(
        queue_id=request.queue_id,
        key=request.key,
        acceptance_number=request.number,
        state=request.state,
        digest=request.digest,
        body=request.body,
        model=request.model,
        slo_class=request.slo_class,
        prompt_tokens=request.prompt_tokens,
        group_id=request.group_id,
        incarnation=request.incarnation,
        attempt=request.attempt,
        failed_attempts=request.failed_attempts,
        gateway=request.gateway,
        progress=bytes(request.progress),
        logprobs=bytes(request.logprobs),
        expires=request.expiry_s is not None,
    )


def _group_dump(state: MemoryState, group: StoredGroup) -> GroupDump:
    return GroupDump(
        group_id=group.group_id,
        members=tuple(state.by_number[number].queue_id for number in group.members),
        live=group.live,
        instance=group.instance,
        last_instance=group.last_instance,
        waiting_prompt_tokens=group.waiting_prompt_tokens,
        first_deadline_s=group.first_deadline_s,
        last_deadline_s=max(group.first_deadline_s, group.last_deadline_s),
        slo_least_s=group.slo_least_s,
        meta=dict(sorted(group.meta.items())),
    )
