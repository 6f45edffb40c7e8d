"""The way from the queues as they are to the queues as a plan wants them, in bounded chunks that name only what moves.

In each queue the groups of a longest increasing subsequence stay where they are; the others are named in segments, each put right behind
its predecessor. So moving one group to another place costs one id, however long the queue is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qlm_planner.board.board import Board
from qlm_planner.machine.effects import ApplyChunk, Segment
from qlm_planner.policy import BATCH_MAX

GAP_MAX = 4
"""Segments that are so few groups apart are one: a segment costs more than an id."""

FEW = 4
"""So many groups are taken out of a list one by one."""

CHUNK_WORK_MAX = 50_000
"""Ids that the queue's server walks over in one chunk. One segment is sent whatever it costs."""

UNDER_WAY_MAX = 2
"""While the queue's server is at one chunk the next one is made and sent. With more, whatever others ask of the server would wait for all
of them."""

NO_MORE: Iterator[ApplyChunk] = iter(())


def chunks(board: Board, target: Mapping[str, list[str]]) -> Iterator[ApplyChunk]:
    """The way from the board, as it is now, to a target, in parts of at most BATCH_MAX group ids. Each part is for the queues as those
    before it leave them, their versions too, so that it may be sent before they are answered. Groups that left the board or came to it
    since are left as they are."""
    draft = _ChunkBuilder.of(board)
    for name in sorted(target):
        if name not in draft.lists or draft.lists[name] == target[name]:
            continue
        wanted = [group_id for group_id in target[name] if group_id in draft.home]
        for start, end in _runs(draft.lists[name], wanted) if draft.lists[name] != wanted else ():
            at = start
            while at < end:
                ids = tuple(wanted[at : min(end, at + BATCH_MAX - draft.named)])
                if ids and draft.put(name, ids, wanted[at - 1] if at else ""):
                    at += len(ids)
                else:
                    yield draft.take()
    if draft.segments:
        yield draft.take()


@dataclass(slots=True, kw_only=True)
class _ChunkBuilder:
    """A chunk that is being made, on queues as the chunks before it leave them. `home`: the queue of each group. `before`: the queues that
    it touches, as it finds them. `work`: ids that the queue's server walks over for it."""

    lists: dict[str, list[str]]
    versions: dict[str, int]
    plan_version: int
    home: dict[str, str]
    segments: list[Segment] = field(default_factory=list)
    before: dict[str, list[str]] = field(default_factory=dict)
    named: int = 0
    work: int = 0

    @classmethod
    def of(cls, board: Board) -> _ChunkBuilder:
        return cls(
            lists=board.order(),
            versions=dict(board.versions),
            plan_version=board.plan_version,
            home={group_id: name for name, queue in board.queues.items() for group_id in queue},
        )

    def put(self, name: str, ids: tuple[str, ...], predecessor: str) -> bool:
        """Names one more segment, behind a group of its queue. False if that would be too much work: only the first one may be."""
        sources: dict[str, list[str]] = {name: []}
        for group_id in ids:
            sources.setdefault(self.home[group_id], []).append(group_id)
        touched = [source for source in sources if source not in self.before]
        # The server reads and writes each queue of a chunk once, and the queue that a segment goes to once more for that segment.
        work = self.work + len(self.lists[name]) + sum(len(self.lists[source]) for source in touched)
        if self.segments and work > CHUNK_WORK_MAX:
            return False
        for source in touched:
            self.before[source] = list(self.lists[source])
        segment = Segment(instance=name, start=_behind(self.lists[name], ids, predecessor), group_ids=ids)
        _put(self.lists, sources, segment)
        self.home.update(dict.fromkeys(ids, name))
        self.segments.append(segment)
        self.named += len(ids)
        self.work = work
        return True

    def take(self) -> ApplyChunk:
        """What there is of it; goes on with the next one."""
        self.plan_version += 1
        chunk = ApplyChunk(
            plan_version=self.plan_version,
            versions={name: self.versions[name] for name in sorted(self.before)},
            segments=tuple(self.segments),
        )
        for name, before in self.before.items():
            self.versions[name] += before != self.lists[name]
        self.segments, self.before, self.named, self.work = [], {}, 0, 0
        return chunk


def apply_to_board(board: Board, chunk: ApplyChunk) -> None:
    """What the queue does with a chunk, on the board."""
    lists = {name: list(board.queues[name]) for name in chunk.versions}
    homes: dict[str, str] = {}
    for segment in chunk.segments:
        still_open = tuple(each for each in segment.group_ids if each in board.groups and board.groups[each].open)
        _put(lists, _sources(board, still_open), Segment(instance=segment.instance, start=segment.start, group_ids=still_open))
        homes.update(dict.fromkeys(still_open, segment.instance))
    board.move(lists, homes)


@dataclass(slots=True)
class ChunkPipeline:
    """A change of the plan on its way to the queue: chunks that leave before those before them are answered. Each is compare-and-set on the
    versions of the queues that it touches, as the chunks before it leave them. So where one is not applied, those behind it that have a
    queue in common with it are not either, and the others do what they would have done.

    `under_way`: chunks that are not answered. `target`: what they lead to, None once that is given up; `coming`: the others. `room`: one
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


def _runs(have: Sequence[str], wanted: Sequence[str]) -> list[tuple[int, int]]:
    """[begin, end) of the parts of `wanted` that have to be put in place; what lies between them stands right already."""
    place = {group_id: at for at, group_id in enumerate(wanted)}
    standing = [place[group_id] for group_id in have if group_id in place]
    if standing == list(range(len(wanted))):
        return []  # only others stand between them, who are taken away when it is the turn of their queues
    staying = _longest_increasing(standing)
    runs: list[tuple[int, int]] = []
    behind = 0
    for at in (*staying, len(wanted)):
        if at > behind:
            if runs and behind - runs[-1][1] <= GAP_MAX:
                runs[-1] = (runs[-1][0], at)
            else:
                runs.append((behind, at))
        behind = at + 1
    return runs


def _longest_increasing(numbers: Sequence[int]) -> list[int]:
    """A longest increasing subsequence of distinct numbers, by patience sorting: O(n log n)."""
    tops: list[int] = []
    before: dict[int, int] = {}
    for number in numbers:
        pile = bisect_left(tops, number)
        if pile:
            before[number] = tops[pile - 1]
        tops[pile : pile + 1] = [number]
    found: list[int] = []
    at = tops[-1] if tops else None
    while at is not None:
        found.append(at)
        at = before.get(at)
    return found[::-1]


def _behind(queue: Sequence[str], ids: Sequence[str], predecessor: str) -> int:
    """Where the place behind a group will be once `ids` are taken out; the head without one."""
    named = set(ids)
    rest = [group_id for group_id in queue if group_id not in named]
    return rest.index(predecessor) + 1 if predecessor else 0


def _sources(board: Board, group_ids: Sequence[str]) -> dict[str, list[str]]:
    """Where groups are now: the ids by queue."""
    found: dict[str, list[str]] = {}
    for group_id in group_ids:
        found.setdefault(board.groups[group_id].instance, []).append(group_id)
    return found


def _put(lists: dict[str, list[str]], sources: Mapping[str, list[str]], segment: Segment) -> None:
    """Takes a segment's groups from the queues that hold them and puts them on theirs."""
    for name, ids in sources.items():
        if len(ids) <= FEW:
            for group_id in ids:
                lists[name].remove(group_id)
        elif ids:
            named = set(ids)
            lists[name] = [group_id for group_id in lists[name] if group_id not in named]
    lists[segment.instance][segment.start : segment.start] = segment.group_ids
