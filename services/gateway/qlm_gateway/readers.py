"""What the `GatewayMachine` knows of one reader, and its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.request import RequestKey
from qlm_gateway.stream_events import ReaderId, ReaderKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Settings of streams. `patience_s`: how long a reader outlives a queue that does not answer. `locates_max`: questions to the queue
    at a time; `looks_per_tick_max`: those that only time asks for, so that thousands of silent streams do not keep the queue busy."""

    buffer_tokens_max: int = 4_096
    poll_s: float = 0.5
    recheck_s: float = 3.0
    patience_s: float = 60.0
    locates_max: int = 128
    scanned_per_tick_max: int = 1_000
    looks_per_tick_max: int = 16
    unclaimed_max: int = 10_000


@dataclass(slots=True, kw_only=True)
class Reader:
    """`next`: offset of the first token it was not given. `high`, `end_seen`: the end of all frames that came by, and whether the
    request's was among them. `locating`: an answer is awaited, or the question waits for its turn; `asked`: the offset asked from."""

    reader: ReaderId
    kind: ReaderKind
    key: RequestKey
    next: int
    asked: int = 0
    queue_id: str = ""
    buffered: int = 0
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
