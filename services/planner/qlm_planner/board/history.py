"""Lifecycle events and overviews, brought into one order.

An overview of all groups holds what happened up to its `last_event_id`. Events that were applied before, but are not in it, are applied to
it again; events that come later, but are in it, are left out.

One with a page of the groups (`partial_overview`) waits until the events up to it have been read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from qlm_planner.board.board import Board
from qlm_planner.board.partial_overview import Pages, refresh
from qlm_planner.board.snapshot import EntryId, Snapshot
from qlm_planner.machine.effects import ReadOverview
from qlm_planner.machine.events import EventEntry
from qlm_planner.policy import Policy


@dataclass(slots=True, kw_only=True)
class History:
    """`read_to`: the last entry that was read; `truth`: the last one that the newest overview of all groups holds. `overflowed`: too much
    happened during one overview to keep; another is needed. `whole`: the next one is to have all groups: nothing is known yet, or a call
    failed that may have been carried out, or what was read and what is known did not fit together. `view`: one that was read, and not yet
    taken into the board."""

    policy: Policy
    read_to: EntryId = (0, 0)
    truth: EntryId = (0, 0)
    overview_under_way: bool = False
    overflowed: bool = False
    whole: bool = True
    view: Snapshot | None = None
    pages: Pages = field(default_factory=Pages)
    recent: deque[EventEntry] = field(default_factory=deque)

    def overview_begins(self, board: Board) -> ReadOverview:
        self.overview_under_way = True
        self.overflowed = False
        self.recent.clear()
        return ReadOverview(group_ids=None if self.whole else self.pages.take(board))

    def overview_failed(self) -> None:
        self.overview_under_way = False
        self.view = None
        self.recent.clear()

    @property
    def complete(self) -> bool:
        """There is a view, and what it needs has been read."""
        return self.view is not None and (self.view.asked is None or self.read_to >= self.view.last_event_id)

    def read(self, entries: tuple[EventEntry, ...], board: Board) -> None:
        self.pages.see(entries)
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

    def load(self, board: Board, now_s: float) -> bool:
        """Takes the view into the board. False where they do not fit together: all groups are to be read."""
        snapshot, self.view = self.view, None
        assert snapshot is not None, "it is complete"
        since = [entry for entry in self.recent if entry.entry_id > snapshot.last_event_id]
        overflowed = self.overflowed
        self.overview_under_way = False
        self.recent.clear()
        if snapshot.asked is not None:
            fits = not overflowed and refresh(board, snapshot, since, now_s)
            self.whole = self.whole or not fits  # a call may have failed since it was asked for
            return fits
        self.whole = overflowed
        board.load(snapshot, now_s)
        self.truth = snapshot.last_event_id
        # What the overview holds need not be read.
        self.read_to = max(self.read_to, self.truth)
        for change in (change for entry in since for change in entry.changes):
            board.apply_change(change)
        return True
