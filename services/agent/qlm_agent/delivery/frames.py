"""Serialized frames and pieces, written byte by byte: an agent makes one for each few tokens, and a protobuf object costs more than all the
rest of it. The messages are `Frame` of frames.proto and `Result` of request.proto."""

from __future__ import annotations

from collections.abc import Sequence

_QUEUE_ID = b"\x0a"  # field 1, bytes
_ATTEMPT = b"\x10"  # field 2, varint
_OFFSET = b"\x18"  # field 3, varint
_TOKEN_IDS = b"\x22"  # field 4, packed fixed32
_PIECE = b"\x2a"  # field 5, bytes
_OUTPUT_PIECE = b"\x7a"  # field 15 of Result, bytes


def varint(value: int) -> bytes:
    """Protobuf's encoding of a number >= 0."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def frame_prefix(queue_id: str, attempt: int) -> bytes:
    """The common beginning of a run's frames."""
    name = queue_id.encode()
    return _QUEUE_ID + varint(len(name)) + name + _ATTEMPT + varint(attempt)


def token_frame(prefix: bytes, offset: int, token_ids: bytes) -> bytes:
    """A frame of token ids as little-endian uint32; `offset`: index of the first in the output."""
    return b"".join((prefix, _OFFSET, varint(offset), _TOKEN_IDS, varint(len(token_ids)), token_ids))


def piece_frame(prefix: bytes, offset: int, pieces: Sequence[str]) -> bytes:
    """A frame of text pieces; `offset`: index of the first in the output."""
    return b"".join((prefix, _OFFSET, varint(offset), *(_field(_PIECE, piece) for piece in pieces)))


def output_piece(piece: str) -> bytes:
    """A piece as progress holds it: a field `output_pieces` of Result."""
    return _field(_OUTPUT_PIECE, piece)


def _field(tag: bytes, text: str) -> bytes:
    encoded = text.encode()
    return tag + varint(len(encoded)) + encoded
