"""A change of the plan on its way to the queue: chunks that leave before those before them are answered.

Each chunk is compare-and-set on the versions of the queues that it touches, as the chunks before it leave them. So where one is not
applied, those behind it that have a queue in common with it are not either, and the others do what they would have done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from qlm_planner.board import Board
from qlm_planner.chunks import chunks
from qlm_planner.effects import ApplyChunk

UNDER_WAY_MAX = 2
"""While the queue's server is at one chunk the next one is made and sent. With more, whatever others ask of the server would wait for all
of them."""


@dataclass(slots=True)
class Writing:
    """`under_way`: chunks that are not answered. `target`: what they lead to, None once that is given up; `coming`: the others."""

    under_way: int = 0
    target: Mapping[str, list[str]] | None = None
    coming: Iterator[ApplyChunk] = field(default_factory=lambda: iter(()))

    def more(self, board: Board, target: Mapping[str, list[str]]) -> list[ApplyChunk]:
        """Chunks to send now. None, and none under way: the queues are as the target wants them."""
        if self.under_way == 0:
            self.target, self.coming = target, chunks(board, target)
        elif self.target is not target:
            return []  # of another target, or after a conflict: only when all are answered is it known where it goes on from
        found = list(islice(self.coming, UNDER_WAY_MAX - self.under_way))
        self.under_way += len(found)
        return found

    def answered(self, *, applied: bool) -> None:
        """One chunk. What was to come behind one that was not applied is made anew."""
        self.under_way -= 1
        if not applied:
            self.target = None
