"""Requests on their way into groups: those read and not placed yet, and the scan for those that another planner read.

A scan (`read_unplaced`, page by page) finds every request that was accepted and not placed, read by a planner or not. Queue ids grow with
acceptance, so what later comes as an arrival with an id up to the last one scanned was found by the scan, or is placed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from qlm_planner.policy import BATCH_MAX, Policy
from qlm_planner.snapshot import Arrival, EntryId, entry_id


@dataclass(slots=True, kw_only=True)
class Intake:
    """`pending`: queue id -> request, in order of arrival. `scanning`: a scan is under way; it begins with one. `missed`: the last overview
    held unplaced requests that are not here."""

    policy: Policy
    pending: dict[str, Arrival] = field(default_factory=dict)
    scanning: bool = True
    scan_after: str = ""
    scanned: EntryId = (0, 0)
    missed: bool = False

    @property
    def has_room(self) -> bool:
        return len(self.pending) + self.policy.arrivals_max <= self.policy.pending_max

    def rescan(self) -> None:
        """Something may have been read and lost on the way."""
        self.scanning = True
        self.scan_after = ""

    def compare(self, unplaced: int) -> None:
        """An overview counts `unplaced` requests. Where nothing is pending here they are on their way in a read, or were lost with one: two
        such overviews in a row tell."""
        if unplaced == 0 or self.pending or self.scanning:
            self.missed = False
        elif self.missed:
            self.missed = False
            self.rescan()
        else:
            self.missed = True

    def add_page(self, arrivals: tuple[Arrival, ...], read_to: str) -> None:
        """`read_to`: the last queue id of the page, "" for an empty one, which is the last."""
        if read_to:
            self.scan_after = read_to
            self.scanned = max(self.scanned, entry_id(read_to))
        else:
            self.scanning = False
        self._add(arrivals)

    def add_arrivals(self, arrivals: tuple[Arrival, ...]) -> None:
        self._add(arrival for arrival in arrivals if entry_id(arrival.facts.queue_id) > self.scanned)

    def take(self) -> list[Arrival]:
        """The next requests to place."""
        chosen = list(self.pending.values())[:BATCH_MAX]
        for arrival in chosen:
            del self.pending[arrival.facts.queue_id]
        return chosen

    def _add(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            self.pending.setdefault(arrival.facts.queue_id, arrival)
