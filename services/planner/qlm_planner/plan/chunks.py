"""Chunks: changes the queues into those of a plan, in bounded calls that name only moved groups.

On each queue the groups of a longest increasing subsequence stay; the others are named in segments, each behind its predecessor. So moving
one group costs one id, however long the queue is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qlm_planner.board.board import Board
from qlm_planner.machine.effects import ApplyChunk, Segment
from qlm_planner.policy import BATCH_MAX

GAP_MAX = 4
"""Segments at most this many groups apart are merged: a segment costs more than an id."""
FEW = 4
"""Up to this many groups are removed from a list one by one."""
CHUNK_WORK_MAX = 50_000
"""Most ids that the queue's server reads for one chunk; a single segment may exceed it."""
UNDER_WAY_MAX = 2
"""While the server applies a chunk the next is sent. More would delay other calls by all of them."""
NO_MORE: Iterator[ApplyChunk] = iter(())


def chunks(board: Board, target: Mapping[str, list[str]]) -> Iterator[ApplyChunk]:
    """Chunks from the board to a target, of at most BATCH_MAX group ids. Each assumes the queues and versions that its predecessors leave,
    so it may be sent before their answers. Groups that left or were added to the board since keep their place."""
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
    """Builds chunks on queues as their predecessors leave them. `home`: the queue of each group. `before`: the touched queues, before the
    chunk. `work`: ids that the server reads for it."""

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
        """Adds a segment behind a group of its queue. False for too much work, except for the first segment."""
        sources: dict[str, list[str]] = {name: []}
        for group_id in ids:
            sources.setdefault(self.home[group_id], []).append(group_id)
        touched = [source for source in sources if source not in self.before]
        # The server reads and writes each queue of a chunk once, and a segment's target once more.
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
        """Returns the chunk and starts the next one."""
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
    """Applies a chunk to the board as the queue does."""
    lists = {name: list(board.queues[name]) for name in chunk.versions}
    homes: dict[str, str] = {}
    for segment in chunk.segments:
        still_open = tuple(each for each in segment.group_ids if each in board.groups and board.groups[each].open)
        _put(lists, _sources(board, still_open), Segment(instance=segment.instance, start=segment.start, group_ids=still_open))
        homes.update(dict.fromkeys(still_open, segment.instance))
    board.move(lists, homes)


@dataclass(slots=True)
class ChunkPipeline:
    """Sends the chunks of a change before their predecessors are answered. Each is compare-and-set on the versions of its queues, as its
    predecessors leave them: after one that is not applied, those that share a queue with it fail too, and the others hold.

    `under_way`: unanswered chunks. `target`: their goal, None once dropped; `further`: further chunks. `room`: one more may be sent now."""

    under_way: int = 0
    target: Mapping[str, list[str]] | None = None
    further: Iterator[ApplyChunk] = NO_MORE
    room: bool = False

    def more(self, board: Board, target: Mapping[str, list[str]]) -> ApplyChunk | None:
        """The next chunk, one a call, so that the server applies it while the next is built. None with none under way: the queues equal the
        target."""
        if self.under_way == 0:
            self.target, self.further = target, chunks(board, target)
        elif self.target is not target:
            return None  # another target, or a conflict: continue once all are answered
        found = next(self.further, None) if self.under_way < UNDER_WAY_MAX else None
        self.under_way += found is not None
        self.room = found is not None and self.under_way < UNDER_WAY_MAX
        return found

    def answered(self, *, applied: bool) -> None:
        """Counts an answer. After a chunk that was not applied, the rest is built anew."""
        self.under_way -= 1
        if not applied:
            self.target = None


def _runs(have: Sequence[str], wanted: Sequence[str]) -> list[tuple[int, int]]:
    """[begin, end) of the parts of `wanted` to move; groups between them stay."""
    place = {group_id: at for at, group_id in enumerate(wanted)}
    standing = [place[group_id] for group_id in have if group_id in place]
    if standing == list(range(len(wanted))):
        return []  # only groups that leave stand in between; their target queues take them
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
    """A longest increasing subsequence of distinct numbers, by patience sorting. O(n log n)."""
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
    """The position behind a group after `ids` are removed; the head without one."""
    named = set(ids)
    rest = [group_id for group_id in queue if group_id not in named]
    return rest.index(predecessor) + 1 if predecessor else 0


def _sources(board: Board, group_ids: Sequence[str]) -> dict[str, list[str]]:
    """Group ids by their queue."""
    found: dict[str, list[str]] = {}
    for group_id in group_ids:
        found.setdefault(board.groups[group_id].instance, []).append(group_id)
    return found


def _put(lists: dict[str, list[str]], sources: Mapping[str, list[str]], segment: Segment) -> None:
    """Moves a segment's groups from their queues to its queue."""
    for name, ids in sources.items():
        if len(ids) <= FEW:
            for group_id in ids:
                lists[name].remove(group_id)
        elif ids:
            named = set(ids)
            lists[name] = [group_id for group_id in lists[name] if group_id not in named]
    lists[segment.instance][segment.start : segment.start] = segment.group_ids
