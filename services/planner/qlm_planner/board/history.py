"""Merges lifecycle events and overviews into one order.

An overview of all groups holds the changes up to its `last_event_id`: later events are applied to it again, earlier ones are dropped. An
overview of a page of groups (`partial_overview`) waits until the events up to it are read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from qlm_core.vocabulary.stream import EntryId
from qlm_planner.board.board import Board
from qlm_planner.board.partial_overview import Pages, refresh
from qlm_planner.board.snapshot import Snapshot
from qlm_planner.machine.effects import ReadOverview
from qlm_planner.machine.events import EventEntry
from qlm_planner.policy import Policy


@dataclass(slots=True, kw_only=True)
class History:
    """`read_to`: the last entry read; `truth`: the last entry that the newest full overview holds. `overflowed`: more events than
    `replay_max` during one overview, so another is needed. `whole`: the next overview reads all groups: at the start, after a failed call,
    or after a mismatch. `view`: an overview that is not applied yet."""

    policy: Policy
    read_to: EntryId = (0, 0)
    truth: EntryId = (0, 0)
    overview_under_way: bool = False
    overflowed: bool = False
    whole: bool = True
    view: Snapshot | None = None
    pages: Pages = field(default_factory=Pages)
    recent: deque[EventEntry] = field(default_factory=deque)

    def begin_overview(self, board: Board) -> ReadOverview:
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
        """Whether a view waits and the events that it needs are read."""
        return self.view is not None and (self.view.group_ids is None or self.read_to >= self.view.last_event_id)

    def read(self, entries: tuple[EventEntry, ...], board: Board) -> None:
        self.pages.note_returns(entries)
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
        """Applies the view to the board. False for a mismatch: all groups must be read."""
        snapshot, self.view = self.view, None
        assert snapshot is not None, "load follows complete"
        later = [entry for entry in self.recent if entry.entry_id > snapshot.last_event_id]
        overflowed = self.overflowed
        self.overview_under_way = False
        self.recent.clear()
        if snapshot.group_ids is not None:
            fits = not overflowed and refresh(board, snapshot, later, now_s)
            self.whole = self.whole or not fits  # a call may have failed during the overview
            return fits
        self.whole = overflowed
        board.load(snapshot, now_s)
        self.truth = snapshot.last_event_id
        self.read_to = max(self.read_to, self.truth)  # the overview holds earlier events
        for change in (change for entry in later for change in entry.changes):
            board.apply_change(change)
        return True
