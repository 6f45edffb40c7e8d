"""State of one reader in the `GatewayMachine`, the buffers of all, and its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.streams.events import ReaderId, ReaderKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Settings of streams.

    `readers_max`: most at a time. `buffer_tokens_max`, `buffers_tokens_max`: most that is kept for one reader, and for all of them.
    `stall_s`: how long a reader may leave what is kept for it. `patience_s`: how long it outlives a queue that does not answer.
    `unclaimed_max`: tokens of frames that are kept until it is known whose they are. `locates_max`: questions to the queue at a time;
    `polls_per_tick_max`: those that only time triggers, so that thousands of silent streams do not keep the queue busy."""

    readers_max: int = 10_000
    buffer_tokens_max: int = 4_096
    buffers_tokens_max: int = 1_000_000
    stall_s: float = 5.0
    poll_s: float = 0.5
    recheck_s: float = 3.0
    patience_s: float = 60.0
    locates_max: int = 128
    scanned_per_tick_max: int = 1_000
    polls_per_tick_max: int = 16
    unclaimed_max: int = 10_000


@dataclass(slots=True, kw_only=True)
class Reader:
    """`taken`: offset of the first token that its call has not taken; `next`: of the first that it was not given. `unread_since_s`: since
    when it leaves what it was given. `following`: it gets frames; `ended`: it was given its end. `high`, `end_seen`: the end of all frames
    that arrived, and whether the request's was among them. `locating`: an answer is awaited, or the question waits for its turn;
    `requested`: the offset of its last query. `behind`: it queries when it has taken all, and until then frames pass it by."""

    reader: ReaderId
    kind: ReaderKind
    key: RequestKey
    next: int
    taken: int
    unread_since_s: float = math.inf
    requested: int = 0
    queue_id: str = ""
    following: bool = False
    ended: bool = False
    high: int = 0
    end_seen: bool = False
    locating: bool = False
    bind: bool = False
    behind: bool = False
    mine: bool = False
    heard_s: float = 0.0
    retry_at_s: float = math.inf
    failures: int = 0
    failing_since_s: float = math.inf

    @property
    def unread(self) -> int:
        """Tokens that it was given and has not taken."""
        return self.next - self.taken


PIECE_TOKENS = 256
"""Stored output that a reader is given however little room there is."""


class Buffers:
    """Tokens delivered to all readers and not taken yet: at most `buffers_tokens_max`, and beyond it a frame or a piece for each reader.
    Those always fit into an empty buffer, so that a reader gets on."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self.tokens = 0

    def fits(self, reader: Reader, count: int) -> bool:
        """Whether so many tokens of a frame can be given now."""
        if not reader.unread:
            return True
        return reader.unread + count <= self._limits.buffer_tokens_max and self.tokens + count <= self._limits.buffers_tokens_max

    def room_for_stored(self, reader: Reader, count: int) -> int:
        """How many of so many tokens of stored output can be given now; 0 where the reader is to take first."""
        if reader.unread:
            return count if self.fits(reader, count) else 0
        return min(count, self._limits.buffer_tokens_max, max(PIECE_TOKENS, self._limits.buffers_tokens_max - self.tokens))

    def give(self, now_s: float, reader: Reader, count: int) -> None:
        if not reader.unread:
            reader.unread_since_s = now_s
        reader.next += count
        self.tokens += count

    def take(self, now_s: float, reader: Reader, offset: int) -> None:
        """The reader took all before `offset`."""
        self.tokens -= offset - reader.taken
        reader.taken = offset
        reader.unread_since_s = now_s if reader.unread else math.inf

    def drop(self, reader: Reader) -> None:
        """Forgets what the reader has not taken; it is delivered again later, or never."""
        self.tokens -= reader.unread
        reader.next = reader.taken
        reader.unread_since_s = math.inf
