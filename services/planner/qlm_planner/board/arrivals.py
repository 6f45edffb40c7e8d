"""Requests that wait for a group, and the scan for requests that another planner read.

A scan (`read_unplaced`, page by page) finds every accepted, unplaced request. Queue ids grow with acceptance, so later arrivals with ids up
to the last scanned one are duplicates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qlm_core.vocabulary.stream import EntryId, entry_id_of
from qlm_planner.board.snapshot import Arrival
from qlm_planner.machine.effects import ReadUnplaced
from qlm_planner.policy import BATCH_MAX, Policy

MISSED_OVERVIEWS = 2
"""Consecutive overviews with unplaced requests and none pending here, after which a scan starts: requests were lost."""
BUSY_OVERVIEWS = 20
"""Consecutive overviews with unplaced requests, pending or not, after which a scan starts: pending ones may hide lost ones."""


@dataclass(slots=True, kw_only=True)
class ArrivalBuffer:
    """`pending`: queue id -> request, by arrival. `scanning`: a scan is under way, as at the start; `reading`: a page of it is; `outdated`:
    that page belongs to an earlier scan. `missed`, `busy`: consecutive overviews with unplaced requests, with none pending and in all."""

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
        """Whether more requests wait than one call places."""
        return len(self.pending) > BATCH_MAX

    @property
    def has_room(self) -> bool:
        return len(self.pending) + self.policy.arrivals_max <= self.policy.pending_max

    def rescan(self) -> None:
        """Starts a new scan."""
        self.scanning = True
        self.scan_after = ""
        self.outdated = self.reading
        self.missed = self.busy = 0

    def next_page(self) -> ReadUnplaced | None:
        """The next page of the scan, if one is due. It may run beside placements of earlier pages: it holds later requests."""
        if not self.scanning or self.reading or not self.has_room:
            return None
        self.reading = True
        return ReadUnplaced(after=self.scan_after, count=self.policy.arrivals_max)

    def page_failed(self) -> None:
        """Schedules the page again."""
        self.reading = self.outdated = False

    def compare(self, unplaced: int) -> None:
        """Compares with an overview of `unplaced` requests: pending here, in a read under way, or lost with one (a former leader may read
        too). Repeated ones start a scan."""
        if unplaced == 0 or self.scanning:
            self.missed = self.busy = 0
            return
        self.busy += 1
        self.missed = 0 if self.pending else self.missed + 1
        if self.missed >= MISSED_OVERVIEWS or self.busy >= BUSY_OVERVIEWS:
            self.rescan()

    def add_page(self, arrivals: tuple[Arrival, ...], read_to: str) -> list[Arrival]:
        """Adds a page up to the queue id `read_to` ("": the scan ends). Returns the requests that are new here."""
        outdated, self.reading, self.outdated = self.outdated, False, False
        if outdated:
            pass
        elif read_to:
            self.scan_after = read_to
            self.scanned = max(self.scanned, entry_id_of(read_to))
        else:
            self.scanning = False
        return self._add(arrivals)

    def add_arrivals(self, arrivals: tuple[Arrival, ...]) -> list[Arrival]:
        """Returns the requests that are new here."""
        return self._add(arrival for arrival in arrivals if entry_id_of(arrival.facts.queue_id) > self.scanned)

    def take(self) -> list[Arrival]:
        """Removes and returns the next requests to place."""
        chosen = list(self.pending.values())[:BATCH_MAX]
        for arrival in chosen:
            del self.pending[arrival.facts.queue_id]
        return chosen

    def _add(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        new = [arrival for arrival in arrivals if arrival.facts.queue_id not in self.pending]
        self.pending.update({arrival.facts.queue_id: arrival for arrival in new})
        return new
