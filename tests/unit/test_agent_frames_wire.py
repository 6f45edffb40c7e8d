"""Frames written by hand are what protobuf writes."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from qlm.api.v1.request_pb2 import Result
from qlm.internal.v1.frames_pb2 import Frame
from qlm_agent.delivery.frames import frame_prefix, output_piece, piece_frame, token_frame

NAMES = st.text(min_size=1, max_size=200)
NUMBERS = st.integers(1, 2**32 - 1)


@given(NAMES, NUMBERS, NUMBERS, st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80))
def test_token_frames(queue_id: str, attempt: int, offset: int, ids: list[int]) -> None:
    written = token_frame(frame_prefix(queue_id, attempt), offset, struct.pack(f"<{len(ids)}I", *ids))
    expected = Frame(queue_id=queue_id, attempt=attempt, offset=offset, token_ids=ids)
    assert Frame.FromString(written) == expected
    assert written == expected.SerializeToString(deterministic=True)


def test_offset_zero_reads_as_zero() -> None:
    assert Frame.FromString(token_frame(frame_prefix("1-0", 1), 0, b"\x01\0\0\0")) == Frame(queue_id="1-0", attempt=1, token_ids=[1])


@given(NAMES, NUMBERS, NUMBERS, st.lists(st.text(max_size=40), min_size=1, max_size=20))
def test_piece_frames_and_progress(queue_id: str, attempt: int, offset: int, pieces: list[str]) -> None:
    written = piece_frame(frame_prefix(queue_id, attempt), offset, pieces)
    assert Frame.FromString(written) == Frame(queue_id=queue_id, attempt=attempt, offset=offset, pieces=pieces)
    assert list(Result.FromString(b"".join(map(output_piece, pieces))).output_pieces) == pieces
