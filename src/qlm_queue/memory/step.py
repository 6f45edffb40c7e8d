"""One command on a `MemoryState`: the transitions that several commands share, and what they send."""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

from qlm.api.v1.request_pb2 import RequestState as WireState
from qlm.api.v1.request_pb2 import Result
from qlm.internal.v1.events_pb2 import EventKind, RequestEvents
from qlm.internal.v1.frames_pb2 import Frame, FrameBatch
from qlm_core.vocabulary.instance import UNASSIGNED, instance_of
from qlm_core.vocabulary.request import RequestState
from qlm_queue.memory.state import MemoryState, MemoryStream, StoredGroup, StoredRequest
from qlm_queue.values import ControlKind, TerminalRecord

TERMINAL_EVENTS = {
    RequestState.COMPLETED: EventKind.EVENT_KIND_COMPLETED,
    RequestState.FAILED: EventKind.EVENT_KIND_FAILED,
    RequestState.CANCELLED: EventKind.EVENT_KIND_CANCELLED,
    RequestState.EXPIRED: EventKind.EVENT_KIND_EXPIRED,
}
BACK_OR_ENDED = frozenset(
    {EventKind.EVENT_KIND_UNPULLED, EventKind.EVENT_KIND_REQUEUED, EventKind.EVENT_KIND_UNPLACED, *TERMINAL_EVENTS.values()}
)
WIRE_STATES = {
    RequestState.COMPLETED: WireState.REQUEST_STATE_COMPLETED,
    RequestState.FAILED: WireState.REQUEST_STATE_FAILED,
    RequestState.CANCELLED: WireState.REQUEST_STATE_CANCELLED,
    RequestState.EXPIRED: WireState.REQUEST_STATE_EXPIRED,
}


class Step:
    """The frames and events of one command are collected and sent by `send`: one entry a gateway, and one of events."""

    def __init__(self, state: MemoryState, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self._frames: dict[str, FrameBatch] = defaultdict(FrameBatch)
        self._events = RequestEvents()

    def event(
        self, kind: EventKind.ValueType, request: StoredRequest, *, incarnation: str = "", cause: str = "", extra: bytes = b""
    ) -> None:
        """A requeued request, or one that ended while it waited, holds the time of its first output."""
        event = self._events.events.add()
        event.kind = kind
        event.queue_id = request.queue_id
        event.group_id = request.group_id
        event.incarnation = incarnation
        event.attempt = request.attempt
        event.acceptance_number = request.number
        event.accepted_ms = int(request.accepted_s * 1000)
        event.cause = cause
        event.prompt_tokens = request.prompt_tokens
        if request.state is RequestState.PLACED and kind in BACK_OR_ENDED:
            event.first_token_s = request.first_token_s
        event.MergeFromString(extra)

    def groups_moved(self, instance: str, group_ids: Sequence[str]) -> None:
        """Groups moved to a virtual queue from others."""
        self._events.events.add(kind=EventKind.EVENT_KIND_GROUPS_MOVED, instance=instance, group_ids=group_ids)

    def frame(self, gateway: str, frame: Frame) -> None:
        if gateway:
            self._frames[gateway].frames.append(frame)

    def send(self) -> None:
        for gateway, batch in self._frames.items():
            stream = self.state.frames_of(gateway, self.now_s)
            if stream is None:
                stream = self.state.frames[gateway] = MemoryStream(self.state.bounds.frames_max)
            stream.add(self.now_s, batch.SerializeToString())
            self.state.written.add(("frames", gateway))
        if self._events.events:
            self.state.add_events(self.now_s, self._events.SerializeToString())

    # Groups -----------------------------------------------------------------------------------------------------------

    def join(self, group: StoredGroup, request: StoredRequest) -> None:
        """Makes a request a waiting one of its group, at the place of its acceptance number."""
        insort(group.members, request.number)
        group.waiting_prompt_tokens += request.prompt_tokens
        request.state = RequestState.PLACED
        request.incarnation = ""

    def leave(self, group: StoredGroup, request: StoredRequest) -> None:
        """Takes a waiting request out of its group, and the drained group off its virtual queue."""
        del group.members[bisect_left(group.members, request.number)]
        group.waiting_prompt_tokens -= request.prompt_tokens
        if not group.members:
            self.state.queues[group.instance].group_ids.remove(group.group_id)
            group.instance = ""

    def open(self, group: StoredGroup, instance: str, index: int) -> None:
        """Puts a group on a virtual queue, or on the unassigned one where there is no such instance, and wakes the agent."""
        instance = instance if instance in self.state.queues else UNASSIGNED
        queue = self.state.queues[instance]
        queue.group_ids.insert(index, group.group_id)
        queue.version += 1
        group.instance = group.last_instance = instance
        self.state.send(self.now_s, instance, ControlKind.WAKE)

    def return_to_place(self, request: StoredRequest, index: int) -> None:
        """RUNNING -> PLACED; a group that has to be opened again is put at `index` of the queue it was on. A request whose group is gone
        is placed again."""
        if not request.group_id:
            self.unplace(request)
            return
        group = self.state.groups[request.group_id]
        del self.state.running[request.incarnation][request.number]
        self.join(group, request)
        group.first_deadline_s = min(group.first_deadline_s, request.accepted_s + group.slo_least_s)
        if not group.instance:
            self.open(group, group.last_instance, index)

    def unplace(self, request: StoredRequest) -> None:
        """A request whose group is gone waits to be placed again."""
        if request.state is RequestState.RUNNING:
            del self.state.running[request.incarnation][request.number]
        request.state, request.incarnation, request.group_id = RequestState.ACCEPTED, "", ""
        self.state.unplaced[request.queue_id] = request

    # The end ----------------------------------------------------------------------------------------------------------

    def finish(
        self, request: StoredRequest, end: RequestState, result: bytes, *, by: str = "", frame: bytes = b"", extra: bytes = b""
    ) -> None:
        """The terminal step. `by`: the incarnation that takes it, "" where it is no agent; `frame` and `extra` as in `Completion`."""
        message = self._result(request, end, result, by)
        owner = request.incarnation
        self.event(TERMINAL_EVENTS[end], request, incarnation=owner, extra=extra)
        if request.gateway:
            last = Frame.FromString(frame) if frame else Frame(queue_id=request.queue_id, attempt=request.attempt)
            last.result.CopyFrom(message)
            self.frame(request.gateway, last)
        if request.text:
            message.MergeFromString(bytes(request.progress))
        else:
            message.MergeFromString(bytes(request.logprobs))
            message.output_token_ids.extend(struct.unpack(f"<{len(request.progress) // 4}I", request.progress))
        if owner and owner != by:
            self.state.send(self.now_s, instance_of(owner), ControlKind.CANCEL, request.queue_id, request.attempt)
        self._delete(request)
        record = TerminalRecord(
            state=end, digest=request.digest, queue_id=request.queue_id, attempt=request.attempt, result=message.SerializeToString()
        )
        self.state.end(request, record, by, len(result), self.now_s)

    def _result(self, request: StoredRequest, end: RequestState, result: bytes, by: str) -> Result:
        message = Result.FromString(result)
        message.tenant = request.key.tenant
        message.request_id = request.key.request_id
        message.model = message.model or request.model
        message.state = WIRE_STATES[end]
        message.queue_id = request.queue_id
        message.attempts = request.attempt
        message.incarnation = by
        message.timing.accepted_s = request.accepted_s
        message.timing.placed_s = request.placed_s
        message.timing.started_s = request.started_s
        message.timing.first_token_s = request.first_token_s
        message.timing.finished_s = self.now_s
        return message

    def _delete(self, request: StoredRequest) -> None:
        state = self.state
        if request.state is RequestState.RUNNING:
            del state.running[request.incarnation][request.number]
        if request.group_id:
            group = state.groups[request.group_id]
            if request.state is RequestState.PLACED:
                self.leave(group, request)
            group.live -= 1
            if group.live == 0:
                del state.groups[group.group_id]
        state.unplaced.pop(request.queue_id, None)
        state.remove_expiry(request)
        state.live_by_tenant[request.key.tenant] -= 1
        state.live_by_class[request.slo_class] -= 1
        state.count_bytes(request.key.tenant, request.slo_class, -request.held_bytes)
        del state.requests[request.queue_id], state.by_key[request.key], state.by_number[request.number]
