"""Frames between an agent and its engine processes: a JSON object, and bytes behind it for token ids.

Both ends are the same version on one host, over a private socket pair; so no versions, no checksums. A frame is two little-endian uint32
(length of the object, length of the bytes), the object and the bytes, at most FRAME_BYTES_MAX in all.

A frame of output has the log probabilities of its runs (`qlm_agent.delivery.logprobs`) behind all token ids; `logprobs`: bytes of each row.

To a process: `{"op": ..., "id": n, ...}`; those with an id are answered. From it: `{"t": "hello" | "answer" | "step" | "fatal", ...}`.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

FRAME_BYTES_MAX = 64 << 20
"""Longest frame: far more than the longest prompt, and than a step of the largest batch."""

_LENGTHS = struct.Struct("<II")


class BrokenFrame(ValueError):
    """The bytes are no frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A message with its token ids, as little-endian uint32, and log probabilities."""

    head: dict[str, Any]
    body: bytes = b""

    def encoded(self) -> bytes:
        """Raises BrokenFrame for a frame that is too long."""
        head = json.dumps(self.head, separators=(",", ":")).encode()
        if len(head) + len(self.body) > FRAME_BYTES_MAX:
            raise BrokenFrame(f"a frame of {len(head) + len(self.body):,} bytes is longer than {FRAME_BYTES_MAX:,}")
        return _LENGTHS.pack(len(head), len(self.body)) + head + self.body


class FrameReader:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Returns the complete frames. Raises BrokenFrame; the stream is then useless."""
        self._bytes += data
        frames: list[Frame] = []
        at = 0
        while len(self._bytes) - at >= _LENGTHS.size:
            head_bytes, body_bytes = _LENGTHS.unpack_from(self._bytes, at)
            if head_bytes + body_bytes > FRAME_BYTES_MAX:
                raise BrokenFrame(f"a frame of {head_bytes + body_bytes:,} bytes is longer than {FRAME_BYTES_MAX:,}")
            body_at = at + _LENGTHS.size + head_bytes
            end = body_at + body_bytes
            if len(self._bytes) < end:
                break
            try:
                head = json.loads(self._bytes[at + _LENGTHS.size : body_at])
            except ValueError as error:
                raise BrokenFrame(f"a frame's object cannot be read: {error}") from error
            if not isinstance(head, dict):
                raise BrokenFrame("a frame's object is none")
            frames.append(Frame(head, bytes(self._bytes[body_at:end])))
            at = end
        del self._bytes[:at]
        return frames
