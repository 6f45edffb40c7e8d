"""Frames between an agent and its engine processes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_agent.engines.vllm.process.frames import FRAME_BYTES_MAX, BrokenFrame, Frame, FrameReader

HEADS = st.dictionaries(
    st.text(max_size=5), st.one_of(st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.none()), max_size=4
)


@given(frames=st.lists(st.tuples(HEADS, st.binary(max_size=50)), max_size=5), size=st.integers(1, 40))
def test_frames_come_back_however_the_bytes_are_cut(frames: list[tuple[dict[str, object], bytes]], size: int) -> None:
    data = b"".join(Frame(head, body).encoded() for head, body in frames)
    reader = FrameReader()
    found = [frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])]
    assert [(frame.head, frame.body) for frame in found] == frames


def test_a_frame_has_a_longest_length() -> None:
    with pytest.raises(BrokenFrame):
        FrameReader().feed(struct.pack("<II", FRAME_BYTES_MAX, 1))


@pytest.mark.parametrize("head", [b"{", b"[]", b"\xff"])
def test_a_head_that_is_no_object_is_refused(head: bytes) -> None:
    with pytest.raises(BrokenFrame):
        FrameReader().feed(struct.pack("<II", len(head), 0) + head)
