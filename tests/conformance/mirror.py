"""Applies each command to a queue under test and to the memory twin, and demands equal answers and equal states.

Queue ids differ between the two: callers use those of the queue under test, and the mirror translates them for the twin. Leases and
versions are the same on both, since both count alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from qlm.internal.v1.frames_pb2 import Frame
from qlm_core.vocabulary.errors import QlmError
from qlm_core.vocabulary.pauses import Pause
from qlm_core.vocabulary.request import RequestKey
from qlm_queue.operator_values import LivePage
from qlm_queue.overview import Overview
from qlm_queue.values import AcceptReceipt, ControlEntry, Emission, GroupRecord, HeadGroup, LiveRequest, StreamEntry, TerminalRecord
from queue_dump import QueueDump, canonical, differences, event_values, frame_values, result_values

from .subjects import MemorySubject, Subject

TWIN_STEP_S = 0.001
_STREAM_READS = {"read_frames": 1, "read_events": 0, "read_control": 1}
"""Reads of streams: the place of the entry id among their arguments."""


class Mirror:
    """`await mirror("pull", lease, "m", budget)` calls `pull` on both and returns the answer of the queue under test."""

    def __init__(self, real: Subject, twin: MemorySubject) -> None:
        self.real = real
        self.twin = twin
        self._twin_ids: dict[str, str] = {}
        self._numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._entries: dict[tuple[str, str, str], str] = {}
        self._compares = True
        self.last_dump: QueueDump | None = None

    async def __call__(self, operation: str, *args: Any, **options: Any) -> Any:
        self.twin.clock.now_s += TWIN_STEP_S
        real = await _outcome(getattr(self.real.queue, operation), args, options)
        twin_args = [self._translated(arg) for arg in args]
        if operation in _STREAM_READS:
            after = _STREAM_READS[operation]
            twin_args[after] = self._entries.get((operation, _stream(args, after), args[after]), args[after])
        twin = await _outcome(getattr(self.twin.queue, operation), twin_args, options)
        self._learn(operation, args, real, twin)
        side = {"read_frames": frame_values, "read_events": event_values}.get(operation)
        answers = [_plain(outcome, numbers, side) for outcome, numbers in zip((real, twin), self._numbers, strict=True)]
        assert answers[0] == answers[1], f"{operation}{args}: answers differ:\n{answers[0]}\n{answers[1]} (twin)"
        if self._compares:
            await self.compare(f"{operation}{args}{options}")
        if isinstance(real, QlmError | ValueError):
            raise real
        return real

    async def compare(self, after: str) -> QueueDump:
        """Raises AssertionError where the states differ; returns that of the queue under test."""
        dumps = [await self.real.dump(), await self.twin.dump()]
        found, expected = (canonical(dump, numbers) for dump, numbers in zip(dumps, self._numbers, strict=True))
        lines = differences(found, expected)
        assert not lines, "\n".join([f"after {after} the state differs from the twin's (right):", *lines])
        self.last_dump = dumps[0]
        return dumps[0]

    @contextmanager
    def compared_at_the_end(self) -> Iterator[None]:
        """Leaves out the comparison of states after each command, for long preparations; the next command after it compares."""
        self._compares = False
        yield
        self._compares = True

    async def dump(self) -> QueueDump:
        """The state of the queue under test."""
        return await self.real.dump()

    async def expire_lease(self, role: str) -> None:
        for subject in (self.real, self.twin):
            await subject.expire_lease(role)

    async def expire_request(self, key: RequestKey) -> None:
        for subject in (self.real, self.twin):
            await subject.expire_request(key)

    async def expire_result(self, key: RequestKey) -> None:
        for subject in (self.real, self.twin):
            await subject.expire_result(key)

    def _learn(self, operation: str, args: Sequence[Any], real: Any, twin: Any) -> None:
        if isinstance(real, AcceptReceipt) and isinstance(twin, AcceptReceipt) and not real.duplicate:
            self._twin_ids[real.queue_id] = twin.queue_id
            for numbers, receipt in zip(self._numbers, (real, twin), strict=True):
                numbers[receipt.queue_id] = receipt.acceptance_number
        if isinstance(real, Overview) and isinstance(twin, Overview):
            self._entries["read_events", "", real.last_event_id] = twin.last_event_id
        if operation in _STREAM_READS and isinstance(real, list) and isinstance(twin, list):
            for left, right in zip(real, twin, strict=False):
                self._entries[operation, _stream(args, _STREAM_READS[operation]), left.entry_id] = right.entry_id

    def _translated(self, value: Any) -> Any:
        """The same argument with the twin's ids."""
        if isinstance(value, str):
            return self._twin_ids.get(value, value)
        if isinstance(value, Emission):
            frame = Frame.FromString(value.frame)
            frame.queue_id = self._twin_ids.get(frame.queue_id, frame.queue_id)
            queue_id = self._twin_ids.get(value.queue_id, value.queue_id)
            return dataclasses.replace(value, queue_id=queue_id, frame=frame.SerializeToString())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes = {name: self._translated(getattr(value, name)) for name in ("queue_id", "last") if hasattr(value, name)}
            return dataclasses.replace(value, **changes)
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self._translated(item) for item in value]
        return value


def _stream(args: Sequence[Any], after: int) -> str:
    """The owner of the stream: the argument in front of the entry id, if there is one."""
    return str(args[0]) if after > 0 else ""


async def _outcome(operation: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The answer, or the error that the port allows."""
    try:
        answer = await operation(*args, **options)
    except (QlmError, ValueError) as error:
        return error
    return list(answer) if isinstance(answer, Sequence) and not isinstance(answer, str | bytes | tuple) else answer


def _plain(value: Any, numbers: Mapping[str, int], payloads: Callable[..., Any] | None) -> Any:
    """An answer without what may differ: ids become numbers, times go."""

    def number(queue_id: str) -> str:
        return f"#{numbers[queue_id]}" if queue_id in numbers else queue_id

    match value:
        case QlmError():
            return type(value).__name__, value.reason, {name: text for name, text in value.details.items() if name != "retry_after_s"}
        case ValueError():
            return "ValueError"
        case StreamEntry():
            assert payloads is not None
            return payloads([value.payload], number)
        case ControlEntry():
            return value.kind, number(value.queue_id), value.attempt
        case TerminalRecord():
            return value.state, value.digest, number(value.queue_id), value.attempt, result_values(value.result, number)
        case Overview():
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.name != "last_event_id"}
            return _plain(fields, numbers, payloads)
        case dict():
            return {name: _plain(item, numbers, payloads) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item, numbers, payloads) for item in value]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            fields.pop("accepted_s", None)
            if isinstance(value, Pause):
                fields.pop("since_s")
            # Times that follow from the clock of the queue are compared with that alone.
            if isinstance(value, HeadGroup):
                fields.pop("first_deadline_s")
            if isinstance(value, GroupRecord):
                fields.pop("next_deadline_s")
            if isinstance(value, LiveRequest):
                fields.update((name, fields[name] > 0.0) for name in ("placed_s", "started_s", "first_token_s"))
            if isinstance(value, LivePage):
                fields["after"] = number(value.after)
            if "queue_id" in fields:
                fields["queue_id"] = number(fields["queue_id"])
            return type(value).__name__, _plain(fields, numbers, payloads)
        case _:
            return value


def live(answer: Any) -> LiveRequest:
    """Narrows an answer of `find` in a test."""
    assert isinstance(answer, LiveRequest)
    return answer
