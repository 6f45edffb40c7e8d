"""The way from the queues as they are to the queues as a plan wants them, in bounded chunks that name only what moves.

In each queue the groups of a longest increasing subsequence stay where they are; the others are named in segments, each put right behind
its predecessor. So moving one group to another place costs one id, however long the queue is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from qlm_planner.board import Board
from qlm_planner.effects import ApplyChunk, Segment
from qlm_planner.policy import BATCH_MAX

GAP_MAX = 4
"""Segments that are so few groups apart are one: a segment costs more than an id."""

FEW = 4
"""So many groups are taken out of a list one by one."""

CHUNK_WORK_MAX = 50_000
"""Ids that the queue's server walks over in one chunk: each segment passes over the queues that it takes from and puts on. One segment is
sent whatever it costs."""


def next_chunk(board: Board, target: Mapping[str, list[str]]) -> ApplyChunk | None:
    """The next part of the way from the board to a target: at most BATCH_MAX group ids. None when they are equal. Groups that left the
    board or came to it since are left as they are."""
    left, work = BATCH_MAX, 0
    segments: list[Segment] = []
    lists = {name: list(queue) for name, queue in board.queues.items()}
    touched: set[str] = set()
    for name in sorted(target):
        if name not in lists or lists[name] == target[name]:
            continue
        wanted = [group_id for group_id in target[name] if group_id in board.groups and board.groups[group_id].open]
        for start, end in _runs(lists[name], wanted) if lists[name] != wanted else ():
            ids = tuple(wanted[start:end][:left])
            sources = _sources(board, ids)
            sources.setdefault(name, [])
            work += sum(len(lists[source]) for source in sources)
            if not ids or (segments and work > CHUNK_WORK_MAX):
                return _chunk(board, segments, touched)
            segment = Segment(instance=name, start=_behind(lists[name], ids, wanted[start - 1] if start else ""), group_ids=ids)
            _put(lists, sources, segment)
            segments.append(segment)
            touched.update(sources)
            left -= len(ids)
            if left == 0:
                return _chunk(board, segments, touched)
    return _chunk(board, segments, touched) if segments else None


def apply_to_board(board: Board, chunk: ApplyChunk) -> None:
    """What the queue does with a chunk, on the board."""
    lists = {name: list(board.queues[name]) for name in chunk.versions}
    homes: dict[str, str] = {}
    for segment in chunk.segments:
        still_open = tuple(each for each in segment.group_ids if each in board.groups and board.groups[each].open)
        _put(lists, _sources(board, still_open), Segment(instance=segment.instance, start=segment.start, group_ids=still_open))
        homes.update(dict.fromkeys(still_open, segment.instance))
    board.move(lists, homes)


def _chunk(board: Board, segments: Sequence[Segment], touched: set[str]) -> ApplyChunk:
    return ApplyChunk(
        plan_version=board.plan_version + 1,
        versions={name: board.versions[name] for name in sorted(touched)},
        segments=tuple(segments),
    )


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
