"""Lifecycle events and overviews, brought into one order.

An overview holds what happened up to its `last_event_id`. Events that were applied before, but are not in it, are applied to it again;
events that come later, but are in it, are left out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from qlm_planner.board import Board
from qlm_planner.events import EventEntry
from qlm_planner.policy import Policy
from qlm_planner.snapshot import EntryId, Snapshot


@dataclass(slots=True, kw_only=True)
class History:
    """`read_to`: the last entry that was read; `truth`: the last one that the newest overview holds. `overflowed`: too much happened
    during one overview to keep; another is needed."""

    policy: Policy
    read_to: EntryId = (0, 0)
    truth: EntryId = (0, 0)
    overview_under_way: bool = False
    overflowed: bool = False
    recent: deque[EventEntry] = field(default_factory=deque)

    def overview_begins(self) -> None:
        self.overview_under_way = True
        self.overflowed = False
        self.recent.clear()

    def overview_failed(self) -> None:
        self.overview_under_way = False
        self.recent.clear()

    def read(self, entries: tuple[EventEntry, ...], board: Board) -> None:
        for entry in entries:
            self.read_to = max(self.read_to, entry.entry_id)
            if entry.entry_id <= self.truth:
                continue
            for change in entry.changes:
                board.apply_change(change)
            if self.overview_under_way:
                if len(self.recent) < self.policy.replay_max:
                    self.recent.append(entry)
                else:
                    self.overflowed = True

    def load(self, snapshot: Snapshot, board: Board, now_s: float) -> None:
        """Takes an overview into the board."""
        board.load(snapshot, now_s)
        self.overview_under_way = False
        self.truth = snapshot.last_event_id
        # What the overview holds need not be read.
        self.read_to = max(self.read_to, self.truth)
        for entry in self.recent:
            if entry.entry_id > self.truth:
                for change in entry.changes:
                    board.apply_change(change)
        self.recent.clear()
