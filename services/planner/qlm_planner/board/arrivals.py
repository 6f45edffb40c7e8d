"""Requests on their way into groups: those read and not placed yet, and the scan for those that another planner read.

A scan (`read_unplaced`, page by page) finds every request that was accepted and not placed, read by a planner or not. Queue ids grow with
acceptance, so what later comes as an arrival with an id up to the last one scanned was found by the scan, or is placed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qlm_planner.board.snapshot import Arrival, EntryId, entry_id
from qlm_planner.machine.effects import ReadUnplaced
from qlm_planner.policy import BATCH_MAX, Policy

MISSED_OVERVIEWS = 2
"""After so many overviews in a row that held unplaced requests while none was pending here, some were lost on the way."""
BUSY_OVERVIEWS = 20
"""After so many overviews in a row that held unplaced requests, whatever was pending, some may have been lost behind the others."""


@dataclass(slots=True, kw_only=True)
class ArrivalBuffer:
    """`pending`: queue id -> request, in order of arrival. `scanning`: a scan is under way; it begins with one. `reading`: a page of it is;
    `outdated`: of one that has begun anew since. `missed`, `busy`: overviews in a row that held unplaced requests, those with nothing
    pending here and all."""

    policy: Policy
    pending: dict[str, Arrival] = field(default_factory=dict)
    scanning: bool = True
    scan_after: str = ""
    scanned: EntryId = (0, 0)
    reading: bool = False
    outdated: bool = False
    missed: int = 0
    busy: int = 0

    @property
    def backlog(self) -> bool:
        """More waits than one call places."""
        return len(self.pending) > BATCH_MAX

    @property
    def has_room(self) -> bool:
        return len(self.pending) + self.policy.arrivals_max <= self.policy.pending_max

    def rescan(self) -> None:
        """Something may have been read and lost on the way."""
        self.scanning = True
        self.scan_after = ""
        self.outdated = self.reading
        self.missed = self.busy = 0

    def next_page(self) -> ReadUnplaced | None:
        """The next page of the scan, where one is to be read: beside the placements of those before, since it holds only later requests."""
        if not self.scanning or self.reading or not self.has_room:
            return None
        self.reading = True
        return ReadUnplaced(after=self.scan_after, count=self.policy.arrivals_max)

    def page_failed(self) -> None:
        """The page is to be read again."""
        self.reading = self.outdated = False

    def compare(self, unplaced: int) -> None:
        """An overview counts `unplaced` requests. They are pending here, on their way in a read, or were lost with one, perhaps one of a
        former leader that woke up once more: that something is unplaced in overview after overview tells, at last also under a load so
        steady that there is always something pending."""
        if unplaced == 0 or self.scanning:
            self.missed = self.busy = 0
            return
        self.busy += 1
        self.missed = 0 if self.pending else self.missed + 1
        if self.missed >= MISSED_OVERVIEWS or self.busy >= BUSY_OVERVIEWS:
            self.rescan()

    def add_page(self, arrivals: tuple[Arrival, ...], read_to: str) -> list[Arrival]:
        """`read_to`: the last queue id of the page, "" for an empty one, which is the last. Gives those that were not known."""
        outdated, self.reading, self.outdated = self.outdated, False, False
        if outdated:
            pass
        elif read_to:
            self.scan_after = read_to
            self.scanned = max(self.scanned, entry_id(read_to))
        else:
            self.scanning = False
        return self._add(arrivals)

    def add_arrivals(self, arrivals: tuple[Arrival, ...]) -> list[Arrival]:
        """Gives those that were not known."""
        return self._add(arrival for arrival in arrivals if entry_id(arrival.facts.queue_id) > self.scanned)

    def take(self) -> list[Arrival]:
        """The next requests to place."""
        chosen = list(self.pending.values())[:BATCH_MAX]
        for arrival in chosen:
            del self.pending[arrival.facts.queue_id]
        return chosen

    def _add(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        new = [arrival for arrival in arrivals if arrival.facts.queue_id not in self.pending]
        self.pending.update({arrival.facts.queue_id: arrival for arrival in new})
        return new
