"""The board, compared with a look at the queue that has all of its queues and instances, but only a page of its groups.

What happens to groups the planner does itself or reads from lifecycle events, so it knows their counts without asking: a look at 10,000
groups would stop the queue's server for a tenth of a second, to say what is known. What events do not tell (leases, the versions and the
order of queues, requests that are not placed) is in every look; counts are compared page by page.

The look is taken when the events up to it have been read. It is as the queue was then; what events after it did to the board is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qlm_core.instance import UNASSIGNED
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.board.snapshot import Snapshot
from qlm_planner.machine.events import ChangeKind, EventEntry

PAGE_GROUPS = 250
"""Groups of one look: they cost the server 6 us each, and nobody else is served meanwhile."""


EFFECTS: Mapping[ChangeKind, tuple[int, int, int]] = {
    ChangeKind.PULLED: (-1, 0, 1),
    ChangeKind.RETURNED: (1, 0, -1),
    ChangeKind.ENDED_RUNNING: (0, -1, -1),
    ChangeKind.ENDED_WAITING: (-1, -1, 0),
}
"""Requests of a group that wait, that live, and that an incarnation runs: how many more."""


@dataclass(slots=True)
class Since:
    """What events after the look did to a group."""

    waiting: int = 0
    live: int = 0
    prompt_tokens: int = 0


_NOTHING = Since()


@dataclass(slots=True)
class Pages:
    """Which groups are compared next: those with requests that came back, which may have brought a deadline that no event tells, then all
    in turn."""

    returned: dict[str, None] = field(default_factory=dict)
    turn: deque[str] = field(default_factory=deque)

    def see(self, entries: Iterable[EventEntry]) -> None:
        """Events that were read."""
        for entry in entries:
            for change in entry.changes:
                if change.kind is ChangeKind.RETURNED:
                    self.returned[change.group_id] = None

    def doubt(self, group_ids: Iterable[str]) -> None:
        """Groups whose counts may be wrong."""
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
    """Brings a look into a board that holds all events up to it. `entries`: those after it, which the board holds too. False, and the board
    is as it was, where the two differ in what a page does not mend: all groups are to be read."""
    since, pulled = _since(entries)
    waiting = _Waiting(board, snapshot, since)
    lists = _lists(board, snapshot, since, waiting)
    if lists is None:
        return False
    board.plan_version = max(board.plan_version, snapshot.plan_version)
    board.load_slots(snapshot, now_s)
    for slot in board.slots.values():
        slot.running = max(0, slot.running + pulled.get(slot.facts.incarnation, 0))
    board.incarnations = dict(snapshot.incarnations)
    board.queues, board.versions = lists
    _take_groups(board, snapshot, since, waiting)
    board.newest = {}
    for name in board.queues:
        for group in board.queue_groups(name):
            group.instance = name
            board.join_here(group)
    return True


def _since(entries: Iterable[EventEntry]) -> tuple[dict[str, Since], dict[str, int]]:
    """By group what events did to it, and by incarnation how many more it runs."""
    groups: dict[str, Since] = {}
    running: dict[str, int] = {}
    for entry in entries:
        for change in entry.changes:
            waits, lives, runs = EFFECTS[change.kind]
            group = groups.setdefault(change.group_id, Since())
            group.waiting += waits
            group.live += lives
            group.prompt_tokens += waits * change.prompt_tokens
            running[change.incarnation] = running.get(change.incarnation, 0) + runs
    return groups, running


@dataclass(frozen=True, slots=True)
class _Waiting:
    """How many requests of a group wait now, by the page or else by the board; 0 for a group that neither knows."""

    board: Board
    snapshot: Snapshot
    since: Mapping[str, Since]

    def of(self, group_id: str) -> int:
        row = self.snapshot.groups.get(group_id)
        if row is None:
            group = self.board.groups.get(group_id)
            return 0 if group is None else group.waiting
        told = self.since.get(group_id)
        return max(0, (row.waiting if row.instance else 0) + (0 if told is None else told.waiting))


def _lists(
    board: Board, snapshot: Snapshot, since: Mapping[str, Since], waiting: _Waiting
) -> tuple[dict[str, list[str]], dict[str, int]] | None:
    """The queues and their versions as they are now: those of the look, without what drained since and with what was opened again since,
    where events before had it. None where anything else differs."""
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


def _take_groups(board: Board, snapshot: Snapshot, since: Mapping[str, Since], waiting: _Waiting) -> None:
    """The counts of the page, and who runs its groups."""
    runners: dict[str, list[Slot]] = {}
    for slot in board.slots.values():
        for group_id in slot.runners:
            runners.setdefault(group_id, []).append(slot)
    for group_id in snapshot.asked or ():
        row = snapshot.groups.get(group_id)
        group = board.groups.get(group_id)
        if row is None:
            if group is not None and not group.open and group_id not in since:
                del board.groups[group_id]
            continue
        count = waiting.of(group_id)
        told = since.get(group_id, _NOTHING)
        live = max(count, row.live + told.live)
        if live <= 0:
            board.groups.pop(group_id, None)
            continue
        if group is None:
            group = board.groups[group_id] = board.loaded(row, None)
        group.waiting = count
        group.live = live
        group.waiting_prompt_tokens = max(0, row.waiting_prompt_tokens + told.prompt_tokens)
        group.first_deadline_s, group.last_deadline_s = row.first_deadline_s, row.last_deadline_s
        group.told_next(row.next_deadline_s)
        group.slo_least_s = min(row.slo_least_s, group.traits.slo_s)
        _run(board, group, runners.get(group_id, []))


def _run(board: Board, group: Group, slots: Iterable[Slot]) -> None:
    """Who runs requests of a group, where events told otherwise: where it is or was (`Board`)."""
    running = group.live - group.waiting
    if sum(slot.runners[group.group_id].count for slot in slots) == running:
        return
    for slot in slots:
        del slot.runners[group.group_id]
    home = board.slots.get(group.instance)
    if home is not None and running > 0:
        home.took(group, running)
