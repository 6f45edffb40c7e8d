"""Readers of a request's frames, and frames of requests that nobody here follows yet."""

from __future__ import annotations

from collections.abc import Sequence

from qlm_gateway.streams.events import FrameFacts
from qlm_gateway.streams.readers import Reader


class Following:
    """`unclaimed_max`: tokens of the frames in `unclaimed`, where a frame counts as one at least."""

    def __init__(self, unclaimed_max: int) -> None:
        self._unclaimed_max = unclaimed_max
        self.readers: dict[str, list[Reader]] = {}
        self.unclaimed: dict[str, list[FrameFacts]] = {}
        self._unclaimed = 0

    def of(self, queue_id: str) -> Sequence[Reader] | None:
        """Readers of a request; None for one that nobody follows."""
        return self.readers.get(queue_id)

    def follow(self, reader: Reader) -> Sequence[FrameFacts]:
        """Frames of its request are for it from now on. Returns those that were kept, in order, and keeps them no longer."""
        reader.following = True
        self.readers.setdefault(reader.queue_id, []).append(reader)
        return self._take(reader.queue_id)

    def unfollow(self, reader: Reader) -> None:
        """No more frames. Safe twice."""
        if not reader.following:
            return
        reader.following = False
        readers = self.readers[reader.queue_id]
        readers.remove(reader)
        if not readers:
            del self.readers[reader.queue_id]

    def keep(self, frame: FrameFacts) -> None:
        """Keeps a frame of a request that nobody follows, or not yet. At the bound, frames of the request kept longest are dropped."""
        self.unclaimed.setdefault(frame.queue_id, []).append(frame)
        self._unclaimed += max(1, frame.count)
        while self._unclaimed > self._unclaimed_max:
            self._take(next(iter(self.unclaimed)))

    def forget_unclaimed(self) -> None:
        """Nobody can claim them any more."""
        self.unclaimed.clear()
        self._unclaimed = 0

    def _take(self, queue_id: str) -> Sequence[FrameFacts]:
        frames = self.unclaimed.pop(queue_id, ())
        self._unclaimed -= sum(max(1, frame.count) for frame in frames)
        return frames
