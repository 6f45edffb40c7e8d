"""Log probabilities of output tokens, on their way from an engine to the queue: one record a token.

A record is a serialized field `logprobs` of `Result`, which has the same number in `Frame`: so progress, frames and the result are made of
records by putting them one after the other, and the queue need not read them. All records of a run are equally long.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from qlm_agent.delivery.frames import varint

_TAG = b"\x8a\x01"  # field 17, bytes
_OF_TOKEN = b"\x0a\x04"  # field 1, packed, one float
_TOP_TOKEN_IDS = b"\x12"  # field 2, packed fixed32
_OF_TOP = b"\x1a"  # field 3, packed floats


def record(of_token: float, top: Sequence[tuple[int, float]]) -> bytes:
    """`top`: the likeliest tokens with their log probabilities, the likeliest first."""
    body = _OF_TOKEN + struct.pack("<f", of_token)
    if top:
        size = varint(4 * len(top))
        ids, values = zip(*top, strict=True)
        body += _TOP_TOKEN_IDS + size + struct.pack(f"<{len(top)}I", *ids) + _OF_TOP + size + struct.pack(f"<{len(top)}f", *values)
    return _TAG + varint(len(body)) + body


def record_bytes(top: int | None) -> int:
    """Length of a record with so many likeliest tokens; 0 for None: no log probabilities."""
    return 0 if top is None else len(record(0.0, [(0, 0.0)] * top))


class Records:
    """Records of tokens that are not reported yet, first in, first out; empty without log probabilities (`top` None)."""

    def __init__(self, top: int | None) -> None:
        self._size = record_bytes(top)
        self._held = bytearray()

    def add(self, records: bytes) -> None:
        self._held += records

    def take(self, tokens: int) -> bytes:
        """Returns the records of the next `tokens` tokens."""
        end = tokens * self._size
        taken = bytes(self._held[:end])
        del self._held[:end]
        return taken


def likeliest(found: Iterator[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """So many of them, the likeliest first; of equal ones the lower id."""
    return sorted(found, key=lambda each: (-each[1], each[0]))[:count]
