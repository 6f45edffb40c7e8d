"""Answers of the scripts as values of the port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qlm_core.request import RequestState
from qlm_queue.keys import Keys
from qlm_queue.values import (
    AppliedChunk,
    GroupRecord,
    InstanceRecord,
    LiveRequest,
    Overview,
    Pulled,
    PullResult,
    StepStatus,
    TerminalRecord,
    VirtualQueueRecord,
)

_GROUP_FIELDS = frozenset({"vq", "last_vq", "live", "prompt_tokens", "first_deadline", "version"})


def text_of(answer: bytes) -> str:
    return answer.decode()


def statuses(answer: Sequence[bytes]) -> list[StepStatus]:
    return [StepStatus(status.decode()) for status in answer]


def pairs_of(flat: Sequence[bytes]) -> dict[str, str]:
    """A flat field, value, field, value… list."""
    texts = [item.decode() for item in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def live_request(keys: Keys, answer: Sequence[bytes]) -> LiveRequest:
    """From `live_answer` of the scripts."""
    queue_id, hash_key, number, accepted_ms, state, group_id, incarnation, attempt, failed, gateway, body, text = answer
    return LiveRequest(
        queue_id=queue_id.decode(),
        key=keys.request_key(hash_key.decode()),
        acceptance_number=int(number),
        accepted_s=int(accepted_ms) / 1000,
        state=RequestState(state.decode()),
        group_id=group_id.decode(),
        incarnation=incarnation.decode(),
        attempt=int(attempt),
        failed_attempts=int(failed),
        gateway=gateway.decode(),
        body=body,
        text=text == b"1",
    )


def terminal_record(answer: Sequence[bytes]) -> TerminalRecord:
    """From `terminal_answer` of the scripts."""
    state, digest, queue_id, attempt, result = answer
    return TerminalRecord(
        state=RequestState(state.decode()), digest=digest, queue_id=queue_id.decode(), attempt=int(attempt), result=result
    )


def pulled(keys: Keys, answer: Sequence[Any]) -> Pulled:
    """From a live record with its progress."""
    live = live_request(keys, answer[0])
    return Pulled(
        queue_id=live.queue_id,
        key=live.key,
        group_id=live.group_id,
        acceptance_number=live.acceptance_number,
        accepted_s=live.accepted_s,
        attempt=live.attempt,
        failed_attempts=live.failed_attempts,
        gateway=live.gateway,
        body=live.body,
        progress=answer[1],
        text=live.text,
    )


def pull_result(keys: Keys, answer: Sequence[Any]) -> PullResult:
    head_group, head_model, blocked_tokens, *requests = answer
    return PullResult(
        pulled=[pulled(keys, request) for request in requests],
        head_group=head_group.decode(),
        head_model=head_model.decode(),
        blocked_tokens=int(blocked_tokens),
    )


def applied_chunk(answer: Sequence[bytes]) -> AppliedChunk:
    return AppliedChunk(
        applied=answer[0] == b"1",
        moved=int(answer[1]),
        versions={name: int(version) for name, version in pairs_of(answer[2:]).items()},
    )


def group_record(group_id: str, waiting: int, fields: dict[str, str]) -> GroupRecord:
    return GroupRecord(
        group_id=group_id,
        instance=fields["vq"],
        last_instance=fields["last_vq"],
        waiting=waiting,
        live=int(fields["live"]),
        waiting_prompt_tokens=int(fields["prompt_tokens"]),
        first_deadline_s=float(fields["first_deadline"]),
        version=int(fields["version"]),
        meta={name: value for name, value in fields.items() if name not in _GROUP_FIELDS},
    )


def overview(answer: Sequence[Any]) -> Overview:
    """Sorted by name throughout, so that equal states give equal values."""
    plan_version, accepted, live, unplaced, queues, groups, instances, incarnations, last_event_id = answer
    records = [group_record(gid.decode(), waiting, pairs_of(fields)) for gid, waiting, fields in groups]
    return Overview(
        plan_version=int(plan_version),
        accepted_count=int(accepted),
        live=int(live),
        unplaced=int(unplaced),
        virtual_queues=sorted(
            (
                VirtualQueueRecord(
                    instance=name.decode(), version=int(version), running=running, group_ids=[gid.decode() for gid in group_ids]
                )
                for name, version, running, group_ids in queues
            ),
            key=lambda queue: queue.instance,
        ),
        groups={record.group_id: record for record in sorted(records, key=lambda record: record.group_id)},
        instances=sorted(
            (
                InstanceRecord(name=name.decode(), incarnation=incarnation.decode(), alive=bool(alive), body=body)
                for name, incarnation, alive, body in instances
            ),
            key=lambda instance: instance.name,
        ),
        incarnations={incarnation.decode(): bool(alive) for incarnation, alive in sorted(incarnations)},
        last_event_id=last_event_id.decode(),
    )
