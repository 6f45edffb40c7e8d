"""Readers of a request's frames, and frames of requests that nobody here follows yet."""

from __future__ import annotations

from collections.abc import Sequence

from qlm_gateway.streams.events import FrameFacts
from qlm_gateway.streams.readers import Reader


class Following:
    """`unclaimed_max`: requests whose frames are noted, not kept: (end of the frames, whether the last was among them)."""

    def __init__(self, unclaimed_max: int) -> None:
        self._unclaimed_max = unclaimed_max
        self.readers: dict[str, list[Reader]] = {}
        self.unclaimed: dict[str, tuple[int, bool]] = {}

    def of(self, queue_id: str) -> Sequence[Reader] | None:
        """Readers of a request; None for one that nobody follows."""
        return self.readers.get(queue_id)

    def follow(self, reader: Reader) -> None:
        """Frames of its request are for it from now on. Safe twice."""
        if reader.following:
            return
        reader.following = True
        self.readers.setdefault(reader.queue_id, []).append(reader)
        high, end_seen = self.unclaimed.get(reader.queue_id, (0, False))
        reader.high = max(reader.high, high)
        reader.end_seen = reader.end_seen or end_seen

    def unfollow(self, reader: Reader) -> None:
        """No more frames. Safe twice."""
        if not reader.following:
            return
        reader.following = False
        readers = self.readers[reader.queue_id]
        readers.remove(reader)
        if not readers:
            del self.readers[reader.queue_id]

    def remember(self, frame: FrameFacts) -> None:
        """Notes a frame of a request that nobody follows, or not yet."""
        high, end_seen = self.unclaimed.pop(frame.queue_id, (0, False))
        if len(self.unclaimed) >= self._unclaimed_max:
            del self.unclaimed[next(iter(self.unclaimed))]  # its reader finds out by looking again
        self.unclaimed[frame.queue_id] = (max(high, frame.offset + frame.count), end_seen or frame.last)

    def forget_unclaimed(self) -> None:
        """Nobody can claim them any more."""
        if self.unclaimed:
            self.unclaimed.clear()
