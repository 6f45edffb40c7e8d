"""A change of the plan on its way to the queue: chunks that leave before those before them are answered.

Each chunk is compare-and-set on the versions of the queues that it touches, as the chunks before it leave them. So where one is not
applied, those behind it that have a queue in common with it are not either, and the others do what they would have done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qlm_planner.board.board import Board
from qlm_planner.chunks import chunks
from qlm_planner.effects import ApplyChunk

UNDER_WAY_MAX = 2
"""While the queue's server is at one chunk the next one is made and sent. With more, whatever others ask of the server would wait for all
of them."""

NO_MORE: Iterator[ApplyChunk] = iter(())


@dataclass(slots=True)
class Writing:
    """`under_way`: chunks that are not answered. `target`: what they lead to, None once that is given up; `coming`: the others. `room`: one
    more may be sent before any is answered."""

    under_way: int = 0
    target: Mapping[str, list[str]] | None = None
    coming: Iterator[ApplyChunk] = NO_MORE
    room: bool = False

    def more(self, board: Board, target: Mapping[str, list[str]]) -> ApplyChunk | None:
        """A chunk to send now: one at a time, so that the server is at it while the next one is made. None, and none under way: the queues
        are as the target wants them."""
        if self.under_way == 0:
            self.target, self.coming = target, chunks(board, target)
        elif self.target is not target:
            return None  # of another target, or after a conflict: only when all are answered is it known where it goes on from
        found = next(self.coming, None) if self.under_way < UNDER_WAY_MAX else None
        self.under_way += found is not None
        self.room = found is not None and self.under_way < UNDER_WAY_MAX
        return found

    def answered(self, *, applied: bool) -> None:
        """One chunk. What was to come behind one that was not applied is made anew."""
        self.under_way -= 1
        if not applied:
            self.target = None
