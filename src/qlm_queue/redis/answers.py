"""Answers of the scripts as values of the port."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from qlm_core.vocabulary.pauses import Pause, PauseKind
from qlm_core.vocabulary.request import RequestState
from qlm_queue.keys import Keys, unescape
from qlm_queue.overview import InstanceRecord, Overview, VirtualQueueRecord, WaitsRecord
from qlm_queue.values import (
    AcceptReceipt,
    AppliedChunk,
    Attached,
    ControlEntry,
    ControlKind,
    GroupBehind,
    GroupRecord,
    HeadGroup,
    LiveRequest,
    Pulled,
    PullResult,
    StepStatus,
    StreamEntry,
    TerminalRecord,
)

DIGEST_BYTES = 16
PULLED_STRINGS = 7
"""Fields of each request in the answer to a pull."""
TEXT, LOGPROBS = "1", "L"
"""Forms of output other than token ids alone."""
_CONTROL_KINDS = frozenset(ControlKind)
_GROUP_FIELDS = frozenset({"live", "prompt_tokens", "first_deadline", "last_deadline", "slo_least"})
_ON = "+"
"""In front of the queue that a group is on; else it is the last one."""


def text_of(answer: bytes) -> str:
    return answer.decode()


def texts_of(answer: Sequence[bytes]) -> list[str]:
    return [item.decode() for item in answer]


def state_of(answer: bytes) -> RequestState:
    return RequestState(answer.decode())


def statuses(answer: Sequence[bytes]) -> list[StepStatus]:
    return [StepStatus(status.decode()) for status in answer]


def pairs_of(flat: Sequence[bytes]) -> dict[str, str]:
    """A flat field, value, field, value… list."""
    texts = [item.decode() for item in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def kept_parts(member: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Bytes, queue id, SLO class and name ("<tenant>:<request id>", escaped) of a counted result. Raises ValueError for what is none."""
    size, queue_id, length, rest = member.split(b" ", 3)
    return size, queue_id, rest[: int(length)], rest[int(length) :]


def kept_result(member: bytes) -> tuple[str, str, str, int]:
    """Queue id, tenant, SLO class and bytes of a counted result."""
    size, queue_id, slo_class, named = kept_parts(member)
    return queue_id.decode(), unescape(named.decode().partition(":")[0]), slo_class.decode(), int(size)


def held(answer: Sequence[Any]) -> tuple[int, dict[str, int], dict[str, int]]:
    """Bytes held in all, by tenant and by SLO class, less the results whose window is over."""
    counts = {field: int(number) for field, number in pairs_of(answer[0]).items()}
    by_tenant = Counter({unescape(field[3:]): number for field, number in counts.items() if field.startswith("bt:")})
    by_class = Counter({field[3:]: number for field, number in counts.items() if field.startswith("bc:")})
    total = counts.get("b", 0)
    for member in answer[1]:
        _, tenant, slo_class, size = kept_result(member)
        total, by_tenant[tenant], by_class[slo_class] = total - size, by_tenant[tenant] - size, by_class[slo_class] - size
    return total, +by_tenant, +by_class


def fixed_fields(stored: bytes) -> list[str]:
    """Queue id, acceptance number, acceptance (ms), prompt tokens and SLO class of a request's record."""
    return stored[DIGEST_BYTES:].decode().split(" ", 4)


def state_fields(stored: bytes) -> list[str]:
    """State with attempts, failed attempts, first pull (ms), first output (ms), form of the output ("1": text, "L": with logprobs), and
    owner of a request's record."""
    return stored.decode().split(" ", 5)


def live_request(keys: Keys, answer: Sequence[bytes]) -> LiveRequest:
    """From `live_answer` of the scripts."""
    hash_key, fixed, state, gateway, group_id, placed_ms, body = answer
    queue_id, number, accepted_ms, _, _ = fixed_fields(fixed)
    attempt, failed, started_ms, first_output_ms, form, incarnation = state_fields(state)
    return LiveRequest(
        queue_id=queue_id,
        key=keys.request_key(hash_key.decode()),
        acceptance_number=int(number),
        accepted_s=int(accepted_ms) / 1000,
        state=RequestState(attempt[0]),
        group_id=group_id.decode(),
        incarnation=incarnation,
        attempt=int(attempt[1:]),
        failed_attempts=int(failed),
        gateway=gateway.decode(),
        body=body,
        text=form == TEXT,
        placed_s=int(placed_ms or 0) / 1000,
        started_s=int(started_ms or 0) / 1000,
        first_token_s=int(first_output_ms or 0) / 1000,
    )


def arrivals(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> dict[bytes, tuple[bytes, bytes]]:
    """Queue id -> hash key and body of entries of the global queue."""
    return {queue_id: (fields[b"k"], fields[b"r"]) for queue_id, fields in entries}


def arrived(keys: Keys, entries: Mapping[bytes, tuple[bytes, bytes]], answer: Sequence[Sequence[bytes]]) -> list[LiveRequest]:
    """From the records of `arrived`, with the bodies of the entries."""
    found = [live_request(keys, record) for record in answer]
    return [replace(request, body=entries[request.queue_id.encode()][1]) for request in found]


def terminal_record(answer: Sequence[bytes]) -> TerminalRecord:
    """From `terminal_answer` of the scripts."""
    state, digest, queue_id, attempt, result = answer
    return TerminalRecord(
        state=RequestState(state.decode()), digest=digest, queue_id=queue_id.decode(), attempt=int(attempt), result=result
    )


def live_or_ended(keys: Keys, answer: Sequence[Any]) -> LiveRequest | TerminalRecord:
    kind, record = answer
    return live_request(keys, record) if kind == b"live" else terminal_record(record)


def receipt(answer: Sequence[bytes]) -> AcceptReceipt:
    queue_id, number, accepted_ms, state, duplicate = answer
    return AcceptReceipt(
        queue_id=queue_id.decode(),
        acceptance_number=int(number),
        accepted_s=int(accepted_ms) / 1000,
        state=state_of(state),
        duplicate=duplicate == b"1",
    )


def attached(keys: Keys, answer: Sequence[Any]) -> Attached:
    kind, record, output, produced, form = answer
    progress, logprobs = output_parts(output) if form.decode() == LOGPROBS else (output, b"")
    return Attached(
        ended=terminal_record(record) if kind == b"ended" else None,
        live=live_request(keys, record) if kind == b"live" else None,
        progress=progress,
        produced=int(produced),
        logprobs=logprobs,
    )


def stream_entries(field: bytes, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[StreamEntry]:
    """Entries of another form are left out: they are hints, and what they say is in the records too."""
    return [StreamEntry(entry_id=entry_id.decode(), payload=fields[field]) for entry_id, fields in entries if field in fields]


def control_entries(entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[ControlEntry]:
    """Entries of another form are left out, as above."""
    return [
        ControlEntry(
            entry_id=entry_id.decode(), kind=ControlKind(fields[b"k"].decode()), queue_id=fields[b"i"].decode(), attempt=int(fields[b"a"])
        )
        for entry_id, fields in entries
        if fields.get(b"k", b"").decode(errors="replace") in _CONTROL_KINDS and fields.get(b"a", b"").isdigit() and b"i" in fields
    ]


def profiles(answer: Sequence[bytes | None]) -> tuple[int, bytes]:
    version, body = answer
    return (int(version), body) if version is not None and body is not None else (0, b"")


def waits(answer: Sequence[Any]) -> WaitsRecord:
    body, accepted, live, paused = answer
    return WaitsRecord(body=body, accepted_count=int(accepted), live=int(live), pauses=_pauses(paused))


def pulled(keys: Keys, answer: Sequence[bytes]) -> Pulled:
    """From `pull`, or from `live_answer` of the scripts, with the progress."""
    hash_key, fixed, state, gateway, group_id, *_, body, output = answer
    queue_id, number, accepted_ms, _, _ = fixed_fields(fixed)
    attempt, failed, _, _, form, _ = state_fields(state)
    progress, logprobs = output_parts(output) if form == LOGPROBS else (output, b"")
    return Pulled(
        queue_id=queue_id,
        key=keys.request_key(hash_key.decode()),
        group_id=group_id.decode(),
        acceptance_number=int(number),
        accepted_s=int(accepted_ms) / 1000,
        attempt=int(attempt[1:]),
        failed_attempts=int(failed),
        gateway=gateway.decode(),
        body=body,
        progress=progress,
        text=form == TEXT,
        logprobs=logprobs,
    )


def pulled_all(keys: Keys, answer: Sequence[Any]) -> list[Pulled]:
    return [pulled(keys, each) for each in answer]


def output_parts(output: bytes) -> tuple[bytes, bytes]:
    """Progress and logprobs from `with_logprobs` of the scripts."""
    length, _, parts = output.partition(b" ")
    return parts[: int(length)], parts[int(length) :]


def pull_result(keys: Keys, answer: Sequence[Any]) -> PullResult:
    blocked_tokens, head, behind, suspect, *flat = answer
    return PullResult(
        pulled=[pulled(keys, flat[at : at + PULLED_STRINGS]) for at in range(0, len(flat), PULLED_STRINGS)],
        head=head_group(head) if head else None,
        blocked_tokens=int(blocked_tokens),
        suspect=suspect == b"1",
        behind=tuple(
            GroupBehind(
                model=model.decode(),
                slo_class=slo_class.decode(),
                slo_kind=slo_kind.decode(),
                waiting=int(waiting),
                first_deadline_s=float(first_deadline_s),
            )
            for model, slo_class, slo_kind, first_deadline_s, waiting in zip(*[iter(behind)] * 5, strict=True)
        ),
    )


def head_group(answer: Sequence[Any]) -> HeadGroup:
    """From `head_answer` of the scripts."""
    group_id, place, waiting, accepted_ms, fields = answer
    group = group_record(group_id.decode(), place.decode(), waiting, int(accepted_ms), pairs_of(fields))
    return HeadGroup(
        group_id=group.group_id,
        model=group.meta.get("model", ""),
        waiting=group.waiting,
        waiting_prompt_tokens=group.waiting_prompt_tokens,
        first_deadline_s=group.next_deadline_s,
        meta=group.meta,
    )


def applied_chunk(answer: Sequence[bytes]) -> AppliedChunk:
    return AppliedChunk(
        applied=answer[0] == b"1",
        moved=int(answer[1]),
        versions={name: int(version) for name, version in pairs_of(answer[2:]).items()},
    )


def group_record(group_id: str, place: str, waiting: int, accepted_ms: int, fields: dict[str, str]) -> GroupRecord:
    """`place`: as `groups` has it (`qlm_queue.keys`); `accepted_ms`: of the first that waits. A group of an older version has no last
    deadline."""
    first_deadline_s, slo_least_s = float(fields["first_deadline"]), float(fields["slo_least"])
    due_s = accepted_ms / 1000 + slo_least_s if waiting and slo_least_s < math.inf else first_deadline_s
    return GroupRecord(
        group_id=group_id,
        instance=place[1:] if place.startswith(_ON) else "",
        last_instance=place[1:],
        waiting=waiting,
        live=int(fields["live"]),
        waiting_prompt_tokens=int(fields["prompt_tokens"]),
        first_deadline_s=first_deadline_s,
        next_deadline_s=max(first_deadline_s, due_s),
        last_deadline_s=max(first_deadline_s, float(fields.get("last_deadline", "-inf"))),
        slo_least_s=slo_least_s,
        meta={name: value for name, value in fields.items() if name not in _GROUP_FIELDS},
    )


def group_records(answer: Sequence[Any]) -> list[GroupRecord]:
    """From `group_answer` of the scripts, one for each."""
    return [
        group_record(gid.decode(), place.decode(), waiting, int(first.partition(b"-")[0] or 0), pairs_of(fields))
        for gid, place, waiting, first, fields in answer
    ]


def overview(answer: Sequence[Any]) -> Overview:
    """Sorted by name throughout, so that equal states give equal values."""
    plan_version, accepted, live, unplaced, queues, groups, instances, incarnations, last_event_id, damage_count, paused = answer
    records = group_records(groups)
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
        damage_count=int(damage_count),
        pauses=_pauses(paused),
    )


def _pauses(paused: Sequence[bytes]) -> list[Pause]:
    return sorted(map(_pause, pairs_of(paused).items()), key=lambda pause: (pause.kind, pause.name))


def _pause(field: tuple[str, str]) -> Pause:
    """A damaged time is 0: what is paused stays so."""
    (kind, _, name), since_ms = field[0].partition(":"), field[1]
    since_s = int(since_ms) / 1000 if since_ms.isdecimal() else 0.0
    if kind == "t":
        return Pause(kind=PauseKind.TENANT, name=unescape(name), since_s=since_s)
    return Pause(kind=PauseKind.MODEL, name=name, since_s=since_s)
