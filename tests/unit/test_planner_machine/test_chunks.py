"""Plans are written as differences: bounded chunks that name only what moves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.vocabulary.instance import UNASSIGNED, InstanceFacts
from qlm_planner.board.board import Board
from qlm_planner.board.slot import Slot
from qlm_planner.machine.effects import ApplyChunk, PlanCause
from qlm_planner.machine.events import Tick
from qlm_planner.plan.chunks import CHUNK_WORK_MAX, UNDER_WAY_MAX, ChunkPipeline, apply_to_board, chunks
from qlm_planner.policy import BATCH_MAX, Policy
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import Bounds, GroupPlacement, Lease, PlanChunk, QueueSegment, RequestPlacement

from .test_cheapest_place import group
from .world import LEASE_S, START_S, World

NAMES = ("a", "b", "c")


def board_of(queues: dict[str, list[int]]) -> Board:
    board = Board(slo_band=0)
    for name in NAMES:
        facts = InstanceFacts(name=name, incarnation=f"{name}/1", gpu="big", n_gpu=1, engine="simulated", models=("alpha",))
        board.slots[name] = Slot(facts=facts)
        board.queues[name], board.versions[name] = [], 3
    for name, numbers in queues.items():
        for number in numbers:
            made = group(number, "alpha", 60.0)
            made.instance = name
            board.open_group(made, len(board.queues[name]))
    return board


def ids(numbers: Sequence[int]) -> list[str]:
    return [f"alpha-{number}" for number in numbers]


def carry_out(board: Board, target: dict[str, list[str]]) -> list[ApplyChunk]:
    done: list[ApplyChunk] = []
    while (chunk := next(chunks(board, target), None)) is not None:
        assert len(done) < 100, "it does not come to an end"
        apply_to_board(board, chunk)
        done.append(chunk)
    return done


def named(chunks: Sequence[ApplyChunk]) -> list[str]:
    return [group_id for chunk in chunks for segment in chunk.segments for group_id in segment.group_ids]


def test_nothing_is_written_for_a_plan_that_is_carried_out_already() -> None:
    board = board_of({"a": [1, 2, 3]})
    assert list(chunks(board, {"a": ids([1, 2, 3]), "b": []})) == []


def test_one_group_to_another_place_is_one_id() -> None:
    """However long the queue is, and only its own queue's version is requested."""
    board = board_of({"a": list(range(1000)), "b": list(range(1000, 1500))})
    order = [*range(5), *range(6, 900), 5, *range(900, 1000)]
    [chunk] = carry_out(board, {"a": ids(order), "b": list(board.queues["b"])})
    assert named([chunk]) == ["alpha-5"]
    assert chunk.versions == {"a": 3}
    assert [(segment.instance, segment.start) for segment in chunk.segments] == [("a", 899)]


def test_groups_spread_over_a_queue_are_named_alone() -> None:
    """New homes for the groups of a lost instance: those that were there already are not written again."""
    board = board_of({"a": list(range(0, 1000, 10)), "b": [number for number in range(1000) if number % 10]})
    chunks = carry_out(board, {"a": [], "b": ids(range(1000))})
    assert board.queues["b"] == ids(range(1000))
    assert len(named(chunks)) == 100


def test_neighbours_are_one_segment() -> None:
    board = board_of({"a": list(range(100)), "b": []})
    order = [*range(50), 90, 91, 92, *range(50, 90), *range(93, 100)]
    [chunk] = carry_out(board, {"a": ids(order)})
    assert [(segment.start, segment.group_ids) for segment in chunk.segments] == [(50, tuple(ids([90, 91, 92])))]


def test_chunks_are_bounded_in_ids_and_in_work() -> None:
    board = board_of({"a": list(range(4000)), "b": []})
    chunks = carry_out(board, {"a": ids(range(0, 4000, 2)), "b": ids(range(3999, 0, -2))})
    assert board.queues["b"] == ids(range(3999, 0, -2))
    assert max(len(named([chunk])) for chunk in chunks) == BATCH_MAX
    sparse = board_of({"a": list(range(4000)), "b": []})
    order = [number for number in range(4000) if number % 100] + [number for number in range(4000) if number % 100 == 0]
    mixed = [each for pair in itertools.zip_longest(order[:3000:100], order[3000:], order[:3000]) for each in pair if each is not None]
    wanted = ids(list(dict.fromkeys(mixed + order)))
    for chunk in carry_out(sparse, {"a": wanted}):
        assert len(chunk.segments) == 1 or len(chunk.segments) * 4000 <= CHUNK_WORK_MAX
    assert sparse.queues["a"] == wanted


def test_new_and_ended_groups_are_left_as_they_are() -> None:
    board = board_of({"a": [1, 2, 3, 4]})
    target = {"a": ids([4, 9, 1, 3]), "gone": ids([2])}
    carry_out(board, target)
    assert board.queues["a"] == ids([4, 1, 2, 3]) or board.queues["a"] == ids([4, 1, 3, 2])


async def queue_of(queues: dict[str, list[int]]) -> tuple[MemoryQueue, Lease]:
    """A queue whose virtual queues hold these groups, and the planner's lease of it."""
    queue = MemoryQueue("test", Bounds(), lambda: START_S)
    world = World()
    world.queue = queue
    for name in NAMES:
        await world.join(name)
    lease = await queue.acquire_lease("planner", "nonce", 1e6, "")
    assert lease is not None
    for name, numbers in queues.items():
        for group_id in ids(numbers):
            [key] = await world.submit("alpha")
            found = await queue.find(key)
            opening = GroupPlacement(group_id=group_id, instance=name, before="", first_deadline_s=START_S, meta={"model": "alpha"})
            await queue.place(lease, [opening], [RequestPlacement(queue_id=found.queue_id, key=key, group_id=group_id)])
    return queue, lease


def split(order: list[int], first: int, second: int) -> dict[str, list[int]]:
    first, second = sorted((first, second))
    return {"a": order[:first], "b": order[first:second], "c": order[second:]}


async def applied(queue: MemoryQueue, lease: Lease, chunk: ApplyChunk) -> bool:
    segments = [QueueSegment(instance=each.instance, start=each.start, group_ids=each.group_ids) for each in chunk.segments]
    plan = PlanChunk(plan_version=chunk.plan_version, versions=chunk.versions, segments=segments)
    return (await queue.apply_plan(lease, plan)).applied


permutations = st.permutations(range(24))


@given(before=permutations, after=permutations, cuts=st.tuples(*[st.integers(0, 24)] * 4), extra=st.sets(st.integers(0, 23), max_size=5))
async def test_the_queue_becomes_what_the_board_becomes(
    before: list[int], after: list[int], cuts: tuple[int, int, int, int], extra: set[int]
) -> None:
    """Any order to any other, on the queue itself: it and the board go the same way, and end as the target wants. `extra` are groups that
    the target does not know."""

    queue, lease = await queue_of(split(before, cuts[0], cuts[1]))
    board = board_of(split(before, cuts[0], cuts[1]))
    target = {name: ids([each for each in order if each not in extra]) for name, order in split(after, cuts[2], cuts[3]).items()}
    for _ in range(50):
        overview = await queue.overview()
        queues = {each.instance: list(each.group_ids) for each in overview.virtual_queues if each.instance != UNASSIGNED}
        assert queues == {name: board.queues[name] for name in NAMES}
        board.versions = {each.instance: each.version for each in overview.virtual_queues}
        board.plan_version = overview.plan_version
        chunk = next(chunks(board, target), None)
        if chunk is None:
            break
        assert await applied(queue, lease, chunk)
        apply_to_board(board, chunk)
    left_out = {f"alpha-{number}" for number in extra}
    assert {name: [each for each in board.queues[name] if each not in left_out] for name in NAMES} == target


@given(before=permutations, after=permutations, cuts=st.tuples(*[st.integers(0, 24)] * 4), ids_max=st.integers(1, 9))
async def test_all_chunks_of_a_change_may_leave_before_the_first_is_answered(
    before: list[int], after: list[int], cuts: tuple[int, int, int, int], ids_max: int
) -> None:
    """Each is for the queues, and has their versions, as those before it leave them."""
    queue, lease = await queue_of(split(before, cuts[0], cuts[1]))
    board = board_of(split(before, cuts[0], cuts[1]))
    overview = await queue.overview()
    board.versions |= {each.instance: each.version for each in overview.virtual_queues}
    board.plan_version = overview.plan_version
    target = {name: ids(order) for name, order in split(after, cuts[2], cuts[3]).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qlm_planner.plan.chunks.BATCH_MAX", ids_max)
        made = list(chunks(board, target))
    assert all(len(named([chunk])) <= ids_max for chunk in made)
    for chunk in made:
        assert await applied(queue, lease, chunk)
        apply_to_board(board, chunk)
    assert {name: board.queues[name] for name in NAMES} == target
    assert {each.instance: list(each.group_ids) for each in (await queue.overview()).virtual_queues if each.group_ids} == {
        name: queue for name, queue in target.items() if queue
    }


async def test_a_replan_writes_less_than_all() -> None:
    """One queue of many changes: the others are not written, nor their versions requested."""
    world = World(Policy(lease_ttl_s=LEASE_S))
    for name in ("a", "b", "c"):
        await world.join(name, models=["alpha"])
    await world.lead()
    await world.submit("alpha", slo_s=3600.0, count=3000)
    await world.settle()
    await world.join("d", models=["beta"])
    await world.submit("beta", slo_s=3600.0, count=10)
    await world.advance(5.0)
    chunks = [call for call in world.calls if isinstance(call, ApplyChunk)]
    assert all(set(chunk.versions) <= {"d", UNASSIGNED} for chunk in chunks), chunks


async def test_nothing_more_is_placed_where_nobody_serves() -> None:
    """A new leader gives a lost instance a lease period before it takes its groups; a request that would join one of them meanwhile goes
    to an instance that serves."""
    world = World()
    await world.join("a")
    await world.lead()
    await world.submit("alpha", slo_s=600.0, count=5)
    await world.settle()
    await world.join("b")
    await world.kill("a")
    await world.lead()
    await world.submit("alpha", slo_s=600.0, count=5)
    await world.settle()
    assert [len(await world.group_ids(name)) for name in ("a", "b")] == [1, 1]
    overview = await world.queue.overview()
    assert [group.waiting for group in overview.groups.values()] == [5, 5]


async def test_a_lone_draining_instance_takes_nothing_more() -> None:
    world = World()
    await world.join("a")
    await world.lead()
    await world.submit("alpha", slo_s=600.0, count=5)
    await world.settle()
    await world.drain("a")
    await world.advance(1.0)
    await world.submit("alpha", slo_s=600.0, count=5)
    await world.settle()
    assert await world.queues() == {"a": [], UNASSIGNED: ["alpha"]}


# Chunks of one change that are under way together ---------------------------------------------------------------------


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
    chunk_numbers = itertools.count()

    async def open_another() -> None:
        if next(chunk_numbers) < chunks_before:
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
    await world.deliver(Tick())
    assert sum(isinstance(call, ApplyChunk) for call in world.calls) >= UNDER_WAY_MAX
    await world.advance(2.0)
    assert machine.changes.conflicts >= 1
    assert machine.changes.change is None
    overview = await world.queue.overview()
    assert {each.instance: list(each.group_ids) for each in overview.virtual_queues} == machine.board.queues
    assert sorted(itertools.chain(*machine.board.queues.values())) == sorted([*itertools.chain(*queues.values()), "other"])
    assert [change.whole for change in world.applied] == [False] * chunks_before, "reported as far as it got"
