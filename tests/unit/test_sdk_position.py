"""A client's reading of a stream: each token once and in order, whatever the connection does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qlm.stream_position import ChunkFate, StreamPosition


def test_chunks_in_order_are_taken() -> None:
    position = StreamPosition(3)
    assert [position.on_chunk(3, 2), position.on_chunk(5, 1)] == [ChunkFate.TAKE, ChunkFate.TAKE]
    assert position.next == 6


def test_known_chunks_are_dropped_and_others_are_requested_again() -> None:
    position = StreamPosition(5)
    assert position.on_chunk(3, 2) is ChunkFate.DROP
    assert position.on_chunk(0, 1) is ChunkFate.DROP
    assert position.on_chunk(4, 2) is ChunkFate.ASK
    assert position.on_chunk(6, 1) is ChunkFate.ASK
    assert position.next == 5


def test_the_rest_of_the_text_at_the_end_is_taken() -> None:
    assert StreamPosition(5).on_chunk(5, 0) is ChunkFate.TAKE


@given(
    output=st.integers(0, 40),
    connections=st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=8), max_size=8),
)
def test_the_client_sees_exactly_the_output(output: int, connections: list[list[tuple[int, int]]]) -> None:
    """Connections that send any chunks of the output and break off, and at last a good one."""
    position, got = StreamPosition(), list[int]()

    def take(offset: int, count: int) -> bool:
        fate = position.on_chunk(offset, count)
        if fate is ChunkFate.TAKE:
            got.extend(range(offset, offset + count))
        return fate is not ChunkFate.ASK

    for chunks in connections:
        for offset, count in chunks:
            if offset + count <= output and not take(offset, count):
                break
    for offset in range(position.next, output):
        assert take(offset, 1)
    assert got == list(range(output))
