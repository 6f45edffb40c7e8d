"""Compares the board with an overview of all queues and instances and of one page of the groups.

The planner knows group counts from its own calls and from events: reading 10,000 groups stops the queue's server for 0.1 s. Leases, queues
with their versions, and unplaced requests are in every overview; group counts are compared page by page. An overview is applied once the
events up to it are read; later events that the board holds stay applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_planner.board.board import Board
from qlm_planner.board.snapshot import Snapshot
from qlm_planner.machine.events import ChangeKind, EventEntry

PAGE_GROUPS = 250
"""Groups in one overview; each occupies the server for 6 us."""

EFFECTS: Mapping[ChangeKind, tuple[int, int, int]] = {
    ChangeKind.PULLED: (-1, 0, 1),
    ChangeKind.RETURNED: (1, 0, -1),
    ChangeKind.ENDED_RUNNING: (0, -1, -1),
    ChangeKind.ENDED_WAITING: (-1, -1, 0),
}
"""Change of the waiting, the live and the running requests."""


@dataclass(slots=True)
class CountChange:
    """Changes of a group by events after the overview."""

    waiting: int = 0
    live: int = 0
    prompt_tokens: int = 0


_NO_CHANGE = CountChange()


@dataclass(slots=True)
class Pages:
    """Chooses the groups of the next overview: groups with returned requests (events carry no deadlines), then all in turn."""

    returned: dict[str, None] = field(default_factory=dict)
    turn: deque[str] = field(default_factory=deque)

    def note_returns(self, entries: Iterable[EventEntry]) -> None:
        """Marks the groups of returned requests."""
        for entry in entries:
            for change in entry.changes:
                if change.kind is ChangeKind.RETURNED:
                    self.returned[change.group_id] = None

    def mark(self, group_ids: Iterable[str]) -> None:
        """Puts groups with uncertain counts on the next page."""
        self.returned.update(dict.fromkeys(group_ids))

    def take(self, board: Board) -> tuple[str, ...]:
        """The next page."""
        if not self.turn:
            self.turn.extend(board.groups)
        page = dict.fromkeys([*self.returned][:PAGE_GROUPS])
        for group_id in page:
            del self.returned[group_id]
        while self.turn and len(page) < PAGE_GROUPS:
            page[self.turn.popleft()] = None
        return tuple(page)


def refresh(board: Board, snapshot: Snapshot, entries: Iterable[EventEntry], now_s: float) -> bool:
    """Applies an overview to a board that holds all events up to it and the later `entries`. False, with the board unchanged, for a
    difference outside the page: all groups must be read."""
    since, pulled = _changes_after(entries)
    waiting = _Waiting(board, snapshot, since)
    lists = _merged_queues(board, snapshot, since, waiting)
    if lists is None:
        return False
    board.plan_version = max(board.plan_version, snapshot.plan_version)
    board.load_slots(snapshot, now_s)
    for slot in board.slots.values():
        slot.running = max(0, slot.running + pulled.get(slot.facts.incarnation, 0))
    board.incarnations = dict(snapshot.incarnations)
    board.queues, board.versions = lists
    _apply_counts(board, snapshot, since, waiting)
    board.newest = {}
    for name in board.queues:
        for group in board.queue_groups(name):
            group.instance = name
            board.mark_newest(group)
    return True


def _changes_after(entries: Iterable[EventEntry]) -> tuple[dict[str, CountChange], dict[str, int]]:
    """Changes by group, and additional running requests by incarnation."""
    groups: dict[str, CountChange] = {}
    running: dict[str, int] = {}
    for entry in entries:
        for change in entry.changes:
            waits, lives, runs = EFFECTS[change.kind]
            group = groups.setdefault(change.group_id, CountChange())
            group.waiting += waits
            group.live += lives
            group.prompt_tokens += waits * change.prompt_tokens
            running[change.incarnation] = running.get(change.incarnation, 0) + runs
    return groups, running


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Counts the waiting requests of a group now, by the page, else by the board; 0 for an unknown group."""

    board: Board
    snapshot: Snapshot
    since: Mapping[str, CountChange]

    def of(self, group_id: str) -> int:
        row = self.snapshot.groups.get(group_id)
        if row is None:
            group = self.board.groups.get(group_id)
            return 0 if group is None else group.waiting
        change = self.since.get(group_id, _NO_CHANGE)
        return max(0, (row.waiting if row.instance else 0) + change.waiting)


def _merged_queues(
    board: Board, snapshot: Snapshot, since: Mapping[str, CountChange], waiting: _Waiting
) -> tuple[dict[str, list[str]], dict[str, int]] | None:
    """The current queues and versions: the overview's, less groups drained by later events, with groups reopened by them at their place on
    the board. None for any other difference."""
    names = (UNASSIGNED, *(row.facts.name for row in snapshot.instances))
    lists: dict[str, list[str]] = {name: [] for name in names}
    versions = dict.fromkeys(names, 0)
    standing: set[str] = set()
    for queue in snapshot.queues:
        if queue.instance not in lists:
            continue
        versions[queue.instance] = queue.version
        for group_id in queue.group_ids:
            if waiting.of(group_id):
                lists[queue.instance].append(group_id)
                standing.add(group_id)
            elif group_id not in since:
                return None
    for name, have in board.queues.items():
        for position, group_id in enumerate(have):
            if group_id in standing or not waiting.of(group_id):
                continue
            if group_id not in since:
                return None
            home = name if name in lists else UNASSIGNED
            lists[home].insert(position, group_id)
            versions[home] += 1
            standing.add(group_id)
    if any(row.instance and waiting.of(group_id) and group_id not in standing for group_id, row in snapshot.groups.items()):
        return None
    return lists, versions


def _apply_counts(board: Board, snapshot: Snapshot, since: Mapping[str, CountChange], waiting: _Waiting) -> None:
    """Sets the counts and the runners of the page's groups."""
    runners = board.slots_by_group()
    for group_id in snapshot.group_ids or ():
        row = snapshot.groups.get(group_id)
        group = board.groups.get(group_id)
        if row is None:
            if group is not None and not group.open and group_id not in since:
                del board.groups[group_id]
            continue
        count = waiting.of(group_id)
        change = since.get(group_id, _NO_CHANGE)
        live = max(count, row.live + change.live)
        if live <= 0:
            board.groups.pop(group_id, None)
            continue
        if group is None:
            group = board.groups[group_id] = board.group_of_row(row, None)
        group.waiting = count
        group.live = live
        group.waiting_prompt_tokens = max(0, row.waiting_prompt_tokens + change.prompt_tokens)
        group.first_deadline_s, group.last_deadline_s = row.first_deadline_s, row.last_deadline_s
        group.set_next_deadline(row.next_deadline_s)
        group.slo_least_s = min(row.slo_least_s, group.traits.slo_s)
        board.settle_runners(group, runners.get(group_id, ()))
