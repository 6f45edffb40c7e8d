"""Chunks of one change that are under way together."""

from __future__ import annotations

import itertools

import pytest

from qlm_planner.board.board import Board
from qlm_planner.machine.effects import ApplyChunk, PlanCause
from qlm_planner.machine.events import Tick
from qlm_planner.plan.chunks import UNDER_WAY_MAX, ChunkPipeline, apply_to_board
from qlm_queue.values import GroupPlacement, RequestPlacement

from .test_chunks import board_of, ids
from .world import World

FORTH, BACK = list(range(3000)), list(range(2999, -1, -1))


def _sent(pipeline: ChunkPipeline, board: Board, target: dict[str, list[str]]) -> list[ApplyChunk]:
    """All that may leave now."""
    return list(iter(lambda: pipeline.more(board, target), None))


def test_a_few_are_under_way_and_the_next_leaves_when_one_is_answered() -> None:
    board, pipeline, target = board_of({"a": FORTH}), ChunkPipeline(), {"a": ids(BACK)}
    waiting: list[ApplyChunk] = []
    for sent in range(UNDER_WAY_MAX):
        assert pipeline.room is (sent > 0)
        chunk = pipeline.more(board, target)
        assert chunk is not None, "one at a time"
        waiting.append(chunk)
    assert not pipeline.room
    assert pipeline.more(board, target) is None
    seen = 0
    while waiting:
        chunk = waiting.pop(0)
        assert chunk.versions == {"a": 3 + seen}, "each as the one before it leaves the queue"
        apply_to_board(board, chunk)
        seen += 1
        pipeline.answered(applied=True)
        more = pipeline.more(board, target)
        waiting += [] if more is None else [more]
        assert pipeline.under_way == len(waiting) <= UNDER_WAY_MAX
    assert board.queues["a"] == target["a"]
    assert seen == 6


def test_behind_one_that_was_not_applied_nothing_leaves_until_all_are_answered() -> None:
    board, pipeline, target = board_of({"a": FORTH}), ChunkPipeline(), {"a": ids(BACK)}
    _sent(pipeline, board, target)
    pipeline.answered(applied=False)
    assert pipeline.more(board, target) is None
    pipeline.answered(applied=False)
    board.versions["a"] = 7
    assert [chunk.versions for chunk in _sent(pipeline, board, target)] == [{"a": 7}, {"a": 8}]


def test_another_target_begins_where_the_chunks_under_way_lead() -> None:
    board, pipeline = board_of({"a": FORTH}), ChunkPipeline()
    first, second = _sent(pipeline, board, {"a": ids(BACK)})
    other = {"a": ids([*BACK[:1500], *FORTH[:1500]])}
    for chunk in (first, second):
        assert pipeline.more(board, other) is None
        apply_to_board(board, chunk)
        board.versions["a"] += 1
        pipeline.answered(applied=True)
    [last, _] = _sent(pipeline, board, other)
    assert last.versions == {"a": 5}


@pytest.mark.parametrize("chunks_before", [0, 1])
async def test_a_change_by_somebody_else_in_the_middle_costs_a_look_and_no_group(
    monkeypatch: pytest.MonkeyPatch, chunks_before: int
) -> None:
    """One of two chunks under way finds its queue changed, and so does the other: the queue is read again, and no group is lost."""
    monkeypatch.setattr("qlm_planner.plan.chunks.BATCH_MAX", 1)
    world = World()
    for name in ("a", "b"):
        await world.join(name)
    machine = await world.lead()
    for number in range(8):
        await world.submit("alpha", slo_s=600.0 * 2.0**number)
    await world.settle()
    queues = machine.board.order()
    world.calls.clear()
    came = itertools.count()

    async def open_another() -> None:
        if next(came) < chunks_before:
            return
        world.before_chunk = None
        assert world.lease is not None
        [key] = await world.submit("alpha")
        request = await world.queue.find(key)
        for name in ("a", "b"):
            other = GroupPlacement(group_id="other", instance=name, before="", first_deadline_s=world.now_s, meta={"model": "alpha"})
            await world.queue.place(world.lease, [other], [RequestPlacement(queue_id=request.queue_id, key=key, group_id="other")])

    world.before_chunk = open_another
    machine.changes.begin(PlanCause.ASKED, {"a": queues["b"][::-1], "b": queues["a"][::-1]}, world.now_s)
    await world.tell(Tick())
    assert sum(isinstance(call, ApplyChunk) for call in world.calls) >= UNDER_WAY_MAX
    await world.advance(2.0)
    assert machine.changes.conflicts >= 1
    assert machine.changes.change is None
    overview = await world.queue.overview()
    assert {each.instance: list(each.group_ids) for each in overview.virtual_queues} == machine.board.queues
    assert sorted(itertools.chain(*machine.board.queues.values())) == sorted([*itertools.chain(*queues.values()), "other"])
    assert [change.whole for change in world.applied] == [False] * chunks_before, "told as far as it came"
