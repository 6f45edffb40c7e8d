"""Paged KV memory. Blocks are alike, so only their number is kept."""

from __future__ import annotations

BLOCK_TOKENS = 16
"""Tokens in one block, as in vLLM."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


class KvBlocks:
    """A pool of blocks. Taking more than are free, or giving back more than were taken, is a bug."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity = capacity_tokens // BLOCK_TOKENS
        self.used = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def take(self, blocks: int) -> None:
        assert 0 <= blocks <= self.free, f"{blocks} blocks of {self.free}"
        self.used += blocks

    def give_back(self, blocks: int) -> None:
        assert 0 <= blocks <= self.used, f"{blocks} blocks given back, {self.used} taken"
        self.used -= blocks
