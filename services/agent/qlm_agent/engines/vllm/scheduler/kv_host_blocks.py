"""Owners of blocks of host memory. Pure; the copies are in `kv_copying`."""

from __future__ import annotations


class HostBlocks:
    """`capacity` blocks, given to owners whole: all that one needs or nothing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._owned: dict[str, list[int]] = {}

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def take(self, owner: str, count: int) -> bool:
        """Gives an owner without blocks its blocks; False if fewer are free."""
        assert owner not in self._owned, f"{owner} owns blocks already"
        if count > len(self._free):
            return False
        self._owned[owner] = [self._free.pop() for _ in range(count)]
        return True

    def of(self, owner: str) -> list[int]:
        """The blocks of an owner, in order."""
        return self._owned[owner]

    def give_back(self, owner: str) -> None:
        """Frees the blocks of an owner; one that has none is ignored."""
        self._free += reversed(self._owned.pop(owner, ()))
