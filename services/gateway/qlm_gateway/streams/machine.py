"""The decisions of a gateway about its readers: the output of each, and when to query the queue again. Pure.

A reader follows one request by its absolute offset. Frames that overlap what it has are cut, duplicates dropped; at a gap it attaches
again, from its offset. So whatever is lost, doubled or late, a reader is given each token once and in order.

- Frames of a request go to one gateway: the last at which its tokens were requested. Readers elsewhere (`mine` is False) poll every
  `poll_s`, without taking it back: two gateways must not fight. Readers here poll too, after a silence of `recheck_s`.
- A reader that does not take what it is given falls `behind` when its buffer is full, when all buffers together are, or after `stall_s`:
  what it holds is forgotten and frames pass it by, until it wants more and attaches again where it stands. So memory is bounded, a
  reader that stalls costs nothing, and nothing is lost: its tokens are in the queue.
- Frames may be read before the answer that says whose they are. While any such answer is awaited, frames of unknown requests are kept,
  within a bound, and are the reader's as soon as it is known. Where the bound drops them, it attaches again: at the gap, or after silence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import assert_never

from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.streams.errors import draining, streams_full
from qlm_gateway.streams.events import (
    Accepted,
    AcceptSent,
    Attach,
    AttachFailure,
    Closed,
    DeliverFrame,
    DeliverOutput,
    DrainStarted,
    Effect,
    EndByFrame,
    EndByRecord,
    Event,
    Find,
    Forget,
    FrameFacts,
    FramesRead,
    Located,
    LocateFailed,
    Opened,
    ReaderId,
    ReaderKind,
    Refusal,
    Refuse,
    Taken,
    Tick,
)
from qlm_gateway.streams.following import Following
from qlm_gateway.streams.readers import Buffers, Reader, StreamLimits

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0


class GatewayMachine:
    """See above. `gateway`: the id that frames for this gateway carry."""

    def __init__(self, gateway: str, limits: StreamLimits) -> None:
        self.gateway = gateway
        self.gaps = 0
        self.overruns = 0
        self._limits = limits
        self._buffers = Buffers(limits)
        self._following = Following(limits.unclaimed_max)
        self._readers: dict[ReaderId, Reader] = {}
        self._accepting: set[ReaderId] = set()
        self._unlocated = 0
        self._locates_in_flight = 0
        self._locate_waits: deque[ReaderId] = deque()
        self._rotation: deque[ReaderId] = deque()
        self._draining = False
        self._drained_at_s = math.inf

    @property
    def reader_count(self) -> int:
        return len(self._readers)

    @property
    def buffered_tokens(self) -> int:
        """Tokens delivered to all readers and not taken yet."""
        return self._buffers.tokens

    @property
    def draining(self) -> bool:
        return self._draining

    def check_open(self) -> None:
        """Raises Unavailable DRAINING where nothing new is taken."""
        if self._draining:
            raise draining()

    def check_room(self) -> None:
        """Raises Unavailable DRAINING, or GatewayFull where no further reader is taken."""
        self.check_open()
        if len(self._readers) + len(self._accepting) >= self._limits.readers_max:
            raise streams_full(self._limits.readers_max)

    def step(self, now_s: float, event: Event) -> list[Effect]:
        """Returns the effects of an event. `now_s`: monotonic."""
        effects: list[Effect] = []
        match event:
            case FramesRead(frames=frames):
                self._frames(now_s, frames, effects)
            case Taken(reader=reader, offset=offset):
                self._taken(now_s, reader, offset, effects)
            case AcceptSent(reader=reader):
                self._accepting.add(reader)
            case Accepted(reader=reader, key=key, queue_id=queue_id):
                self._accepted(now_s, reader, key, queue_id, effects)
            case Opened():
                self._opened(now_s, event, effects)
            case Located():
                self._located(now_s, event, effects)
            case LocateFailed(reader=reader, failure=failure):
                self._locate_failed(now_s, reader, failure, effects)
            case Closed(reader=reader):
                self._closed(reader)
            case Tick():
                self._tick(now_s, effects)
            case DrainStarted(grace_s=grace_s):
                self._draining = True
                self._drained_at_s = min(self._drained_at_s, now_s + grace_s)
            case _:
                assert_never(event)
        return effects

    # Readers come and go ----------------------------------------------------------------------------------------------

    def _accepted(self, now_s: float, reader_id: ReaderId, key: RequestKey, queue_id: str, effects: list[Effect]) -> None:
        if reader_id not in self._accepting:
            return  # closed while the accept was under way
        reader = Reader(reader=reader_id, kind=ReaderKind.TOKENS, key=key, next=0, taken=0, mine=True, heard_s=now_s)
        self._add(reader)
        reader.queue_id = queue_id
        self._accepting.discard(reader_id)
        self._follow(now_s, reader, effects)

    def _opened(self, now_s: float, event: Opened, effects: list[Effect]) -> None:
        self._accepting.discard(event.reader)
        bind = event.kind is ReaderKind.TOKENS
        start = event.offset
        reader = Reader(reader=event.reader, kind=event.kind, key=event.key, next=start, taken=start, bind=bind, heard_s=now_s)
        self._unlocated += 1
        self._add(reader)
        self._locate(reader, effects)

    def _follow(self, now_s: float, reader: Reader, effects: list[Effect]) -> None:
        """Gives a reader the frames that were read before it was known, and those to come."""
        for frame in self._following.follow(reader):
            if not reader.ended:
                self._frame(now_s, reader, frame, effects)
        self._forget_unclaimed()

    def _add(self, reader: Reader) -> None:
        self._readers[reader.reader] = reader
        self._rotation.append(reader.reader)

    def _end(self, reader: Reader, effect: Effect, effects: list[Effect]) -> None:
        """Its end is given, and counts as read when its call closes."""
        effects.append(effect)
        reader.ended = True
        self._following.unfollow(reader)

    def _closed(self, reader_id: ReaderId) -> None:
        self._accepting.discard(reader_id)
        reader = self._readers.pop(reader_id, None)
        if reader is not None:
            self._buffers.drop(reader)
            self._following.unfollow(reader)
            self._unlocated -= not reader.queue_id
        self._forget_unclaimed()

    def _forget_unclaimed(self) -> None:
        if not self._accepting and not self._unlocated:
            self._following.forget_unclaimed()

    # Frames -----------------------------------------------------------------------------------------------------------

    def _frames(self, now_s: float, frames: Sequence[FrameFacts], effects: list[Effect]) -> None:
        for frame in frames:
            readers = self._following.of(frame.queue_id)
            if readers is None:
                if self._accepting or self._unlocated:
                    self._following.keep(frame)
                continue
            for reader in tuple(readers) if frame.last else readers:
                reader.heard_s = now_s
                reader.mine = True
                self._frame(now_s, reader, frame, effects)

    def _frame(self, now_s: float, reader: Reader, frame: FrameFacts, effects: list[Effect]) -> None:
        end = frame.offset + frame.count
        if frame.count and end > reader.high:
            reader.high = end
        if frame.last:
            reader.end_seen = True
        if reader.kind is ReaderKind.END:
            if frame.last:
                self._locate(reader, effects)
            return
        if reader.behind:
            return
        if frame.count and end > reader.next:
            if frame.offset > reader.next:
                if not reader.locating:
                    self.gaps += 1
                self._locate(reader, effects)
                return
            if not self._buffers.fits(reader, end - reader.next):
                self._fall_behind(reader, effects)
                return
            effects.append(DeliverFrame(reader=reader.reader, frame=frame, skip=reader.next - frame.offset, offset=reader.next))
            self._buffers.give(now_s, reader, end - reader.next)
        if frame.last:
            # Only the last frame of a completed request says how much output there is; the rest is in its record.
            if reader.next == frame.total:
                self._end(reader, EndByFrame(reader=reader.reader, frame=frame), effects)
            else:
                self._locate(reader, effects)

    def _fall_behind(self, reader: Reader, effects: list[Effect]) -> None:
        self.overruns += 1
        self._buffers.drop(reader)
        reader.behind = True
        reader.ended = False
        effects.append(Forget(reader=reader.reader))

    def _taken(self, now_s: float, reader_id: ReaderId, offset: int, effects: list[Effect]) -> None:
        reader = self._readers.get(reader_id)
        if reader is None:
            return
        self._buffers.take(now_s, reader, offset)
        if reader.behind and not reader.unread:
            reader.behind = False
            self._locate(reader, effects)

    # Where a request is -----------------------------------------------------------------------------------------------

    def _locate(self, reader: Reader, effects: list[Effect]) -> None:
        if reader.locating:
            return
        reader.locating = True
        reader.retry_at_s = math.inf
        self._locate_waits.append(reader.reader)
        self._send_locates(effects)

    def _send_locates(self, effects: list[Effect]) -> None:
        while self._locate_waits and self._locates_in_flight < self._limits.locates_max:
            reader = self._readers.get(self._locate_waits.popleft())
            if reader is None:
                continue
            self._locates_in_flight += 1
            if reader.kind is ReaderKind.TOKENS or reader.bind:
                reader.requested = reader.next
                effects.append(Attach(reader=reader.reader, key=reader.key, bind=reader.bind, offset=reader.next))
            else:
                effects.append(Find(reader=reader.reader, key=reader.key))

    def _located(self, now_s: float, event: Located, effects: list[Effect]) -> None:
        self._locates_in_flight -= 1
        self._send_locates(effects)
        reader = self._readers.get(event.reader)
        if reader is None:
            return
        reader.locating = False
        found = not reader.bind  # rather than attached
        reader.bind = False
        reader.failures, reader.failing_since_s = 0, math.inf
        reader.heard_s = now_s
        reader.mine = event.gateway == self.gateway
        first = not reader.queue_id
        if first:
            reader.queue_id = event.queue_id
            self._unlocated -= 1
        if reader.ended:
            return
        if reader.kind is ReaderKind.END:
            self._located_end(reader, event, found, effects)
        elif not reader.behind:  # one that is behind asks when it has taken all
            self._located_output(now_s, reader, event, effects)
        if first and not event.ended:
            self._follow(now_s, reader, effects)

    def _located_output(self, now_s: float, reader: Reader, event: Located, effects: list[Effect]) -> None:
        if reader.requested > reader.next:  # it fell behind meanwhile, and needs the output before this answer
            self._locate(reader, effects)
            return
        there = event.produced - reader.next
        if there > 0:
            count = self._buffers.room_for_stored(reader, there)
            if not count:
                self._fall_behind(reader, effects)
                return
            reader.behind = count < there
            effects.append(DeliverOutput(reader=reader.reader, skip=reader.next - reader.requested, offset=reader.next, count=count))
            self._buffers.give(now_s, reader, count)
        if reader.behind:
            return
        if event.ended:
            self._end(reader, EndByRecord(reader=reader.reader), effects)
        elif reader.end_seen or reader.high > reader.next:  # frames passed by that it was not given
            self._locate(reader, effects)

    def _located_end(self, reader: Reader, event: Located, found: bool, effects: list[Effect]) -> None:
        if event.ended and found:
            self._end(reader, EndByRecord(reader=reader.reader), effects)
        elif event.ended:
            self._locate(reader, effects)  # only the answer to `Find` has the whole record
        elif not event.gateway:
            # Nobody follows it: have its frames sent here, so that the end is delivered at once.
            reader.bind = True
            self._locate(reader, effects)
        elif reader.end_seen:
            self._locate(reader, effects)

    def _locate_failed(self, now_s: float, reader_id: ReaderId, failure: AttachFailure, effects: list[Effect]) -> None:
        self._locates_in_flight -= 1
        self._send_locates(effects)
        reader = self._readers.get(reader_id)
        if reader is None:
            return
        reader.locating = False
        if reader.ended:
            return
        match failure:
            case AttachFailure.UNKNOWN_REQUEST:
                self._refuse(reader, Refusal.ERASED if reader.queue_id else Refusal.UNKNOWN_REQUEST, effects)
            case AttachFailure.OFFSET_OUT_OF_RANGE:
                self._refuse(reader, Refusal.OFFSET_OUT_OF_RANGE, effects)
            case AttachFailure.UNREADABLE:
                self._refuse(reader, Refusal.UNREADABLE, effects)
            case AttachFailure.UNAVAILABLE:
                reader.failing_since_s = min(reader.failing_since_s, now_s)
                # A new reader goes to another gateway rather than waits here.
                if not reader.queue_id or now_s - reader.failing_since_s >= self._limits.patience_s:
                    self._refuse(reader, Refusal.QUEUE_UNAVAILABLE, effects)
                    return
                reader.retry_at_s = now_s + min(RETRY_FIRST_S * 2**reader.failures, RETRY_MAX_S)
                reader.failures += 1
            case _:
                assert_never(failure)

    def _refuse(self, reader: Reader, refusal: Refusal, effects: list[Effect]) -> None:
        self._end(reader, Refuse(reader=reader.reader, refusal=refusal), effects)

    # Time -------------------------------------------------------------------------------------------------------------

    def _tick(self, now_s: float, effects: list[Effect]) -> None:
        if now_s >= self._drained_at_s:
            for reader in self._readers.values():
                if not reader.ended:
                    self._refuse(reader, Refusal.DRAINING, effects)
            return
        polls = 0
        for _ in range(min(len(self._rotation), self._limits.scanned_per_tick_max)):
            reader_id = self._rotation.popleft()
            reader_there = self._readers.get(reader_id)
            if reader_there is None:
                continue
            self._rotation.append(reader_id)
            if now_s - reader_there.unread_since_s >= self._limits.stall_s:
                self._fall_behind(reader_there, effects)
            if self._is_due(now_s, reader_there):
                self._locate(reader_there, effects)
                polls += 1
                if polls >= self._limits.polls_per_tick_max:
                    return  # the next tick goes on from here

    def _is_due(self, now_s: float, reader: Reader) -> bool:
        if reader.locating or reader.behind or reader.ended:
            return False
        if reader.failures:
            return now_s >= reader.retry_at_s
        return now_s - reader.heard_s >= (self._limits.recheck_s if reader.mine else self._limits.poll_s)
