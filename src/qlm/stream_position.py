"""The position in a stream of output. Pure: what to do with each chunk, whatever was lost, doubled or sent in another order."""

from __future__ import annotations

from enum import StrEnum


class ChunkFate(StrEnum):
    """TAKE it, DROP it (known already), or ASK again from the position: it leaves a gap, or begins with what is known."""

    TAKE = "take"
    DROP = "drop"
    ASK = "ask"


class StreamPosition:
    """`next`: offset of the first token that was not taken yet."""

    __slots__ = ("next",)

    def __init__(self, offset: int = 0) -> None:
        self.next = offset

    def on_chunk(self, offset: int, count: int) -> ChunkFate:
        """Moves the position where the chunk is taken. A chunk of no tokens brings the rest of the text at the very end."""
        if offset == self.next:
            self.next += count
            return ChunkFate.TAKE
        if offset + count <= self.next:
            return ChunkFate.DROP
        # One that overlaps cannot be cut: its text is of all its tokens together.
        return ChunkFate.ASK
