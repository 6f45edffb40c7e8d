"""A look with a page of the groups leaves the board as one with all of them would; where it cannot, all are read."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.request import RequestKey
from qlm_core.vocabulary.stream import EntryId
from qlm_planner.board.board import Board
from qlm_planner.board.history import History
from qlm_planner.board.partial_overview import PAGE_GROUPS, refresh
from qlm_planner.board.snapshot import InstanceRow, Snapshot
from qlm_planner.machine.effects import ReadOverview
from qlm_planner.machine.events import EventEntry
from qlm_planner.policy import Policy
from qlm_planner.shell.queue_calls import event_entries, snapshot_of
from qlm_queue.values import Owned, Pulled, RequeueCause

from .world import LEASE_S, World

QUIET = Policy(lease_ttl_s=LEASE_S, replan_every_s=1e6, repair_every_s=1e6)


async def filled(chance: random.Random) -> World:
    """Groups of several models on two instances."""
    world = World(QUIET)
    await world.join("a")
    await world.join("b", "small")
    await world.lead()
    for _ in range(12):
        await world.submit(chance.choice(("alpha", "beta", "gamma")), chance.choice((5.0, 60.0, 900.0)), count=chance.randrange(1, 9))
        await world.settle()
    return world


async def happen(world: World, chance: random.Random, held: dict[str, list[Pulled]]) -> None:
    """Random actions of agents and clients."""
    for _ in range(chance.randrange(8)):
        name = chance.choice(("a", "b"))
        mine = held.setdefault(name, [])
        match chance.randrange(4):
            case 0:
                if queue := (await world.queues())[name]:
                    mine += await world.pull(name, queue[0], chance.randrange(1, 12))
            case 1:
                done = [mine.pop() for _ in range(min(len(mine), chance.randrange(4)))]
                await world.complete(name, done)
            case 2:
                back = [mine.pop() for _ in range(min(len(mine), chance.randrange(6)))]
                await world.queue.requeue(
                    world.agents[name][0],
                    [Owned(queue_id=each.queue_id, key=each.key, attempt=each.attempt) for each in back],
                    chance.choice((RequeueCause.EVICTED, RequeueCause.DRAINED)),
                    b"",
                )
            case _:
                waiting = [key for group in (await world.queue.overview()).groups for key in await keys_in(world, group)]
                if waiting:
                    await world.cancel([chance.choice(waiting)])


async def keys_in(world: World, group_id: str) -> list[RequestKey]:
    return [request.key for request in await world.queue.waiting(group_id, 0, 100)]


async def events_after(world: World, after: EntryId) -> tuple[EventEntry, ...]:
    return event_entries(await world.queue.read_events("{}-{}".format(*after), 0.0, 1000))


async def whole(world: World) -> Snapshot:
    return snapshot_of(await world.queue.overview())


def picture(board: Board) -> object:
    groups = {
        name: (group.waiting, group.live, group.waiting_prompt_tokens, group.instance if group.open else "")
        for name, group in board.groups.items()
    }
    return (groups, {name: sorted(queue) for name, queue in board.queues.items()}, sorted(board.newest))


@pytest.mark.parametrize("seed", range(60))
async def test_with_all_events_read_it_is_as_a_look_at_all_groups(seed: int) -> None:
    """The board knows the queue up to some event; a look is taken, more happens and is read."""
    chance = random.Random(seed)
    world = await filled(chance)
    held: dict[str, list[Pulled]] = {}
    await happen(world, chance, held)
    board, history = Board(slo_band=0), History(policy=QUIET)
    history.view = await whole(world)
    assert history.load(board, world.now_s)

    for _ in range(4):
        await happen(world, chance, held)
        ask = history.begin_overview(board)
        assert ask.group_ids is not None
        page = tuple(chance.sample(ask.group_ids, chance.randrange(len(ask.group_ids) + 1)))
        view = snapshot_of(await world.queue.overview(page), page)
        await happen(world, chance, held)
        before = await events_after(world, history.read_to)
        history.view = view
        cut = chance.randrange(len(before) + 1)
        history.read(before[:cut], board)
        if not history.complete:
            history.read(before[cut:], board)
        assert history.complete
        assert history.load(board, world.now_s)
        history.read(await events_after(world, history.read_to), board)

        fresh = Board(slo_band=0)
        fresh.load(await whole(world), world.now_s)
        assert picture(board) == picture(fresh)
        assert {name: slot.running for name, slot in board.slots.items()} == {name: slot.running for name, slot in fresh.slots.items()}
        for name, queue in board.queues.items():
            assert [board.groups[each].instance for each in queue] == [name] * len(queue)


@pytest.mark.parametrize("wrong", ["waiting", "unknown", "standing", "gone"])
async def test_an_error_outside_the_page_requests_all_groups(wrong: str) -> None:
    """A board that is wrong about a group outside the page, which no event explains, is left as it is."""
    world = await filled(random.Random(1))
    board = Board(slo_band=0)
    board.load(await whole(world), world.now_s)
    name, queue = next((name, queue) for name, queue in sorted(board.queues.items()) if len(queue) > 1)
    match wrong:
        case "waiting":
            board.groups[queue[1]].waiting = 0
        case "unknown":
            del board.groups[queue.pop(1)]
        case "standing":
            board.queues[name] = [*queue, "g9-9"]
            board.groups["g9-9"] = board.group_of_row((await whole(world)).groups[queue[0]], None)
        case "gone":
            board.queues[name] = queue[:1]
            board.groups[queue[1]].waiting = 0
    before = picture(board)
    assert not refresh(board, snapshot_of(await world.queue.overview([]), ()), (), world.now_s)
    assert picture(board) == before


async def test_a_page_mends_the_counts_of_its_groups() -> None:
    world = await filled(random.Random(2))
    board, fresh = Board(slo_band=0), Board(slo_band=0)
    board.load(await whole(world), world.now_s)
    fresh.load(await whole(world), world.now_s)
    wrong = next(iter(board.groups))
    board.groups[wrong].waiting += 3
    board.groups[wrong].live += 5
    board.groups[wrong].slo_least_s /= 2.0
    board.groups[wrong].first_deadline_s = board.groups[wrong].next_deadline_s = board.groups[wrong].last_deadline_s = 1.0
    page = (wrong, "nobody")
    assert refresh(board, snapshot_of(await world.queue.overview(page), page), (), world.now_s)
    assert picture(board) == picture(fresh)
    assert board.groups[wrong].first_deadline_s == fresh.groups[wrong].first_deadline_s
    assert board.groups[wrong].next_deadline_s == fresh.groups[wrong].next_deadline_s
    assert board.groups[wrong].last_deadline_s == fresh.groups[wrong].last_deadline_s
    assert board.groups[wrong].slo_least_s == fresh.groups[wrong].slo_least_s


async def test_a_group_that_ended_unseen_is_forgotten_by_the_page_that_names_it() -> None:
    world = await filled(random.Random(3))
    board = Board(slo_band=0)
    board.load(await whole(world), world.now_s)
    ghost = board.group_of_row(next(iter((await whole(world)).groups.values())), None)
    ghost.group_id, ghost.waiting = "g9-9", 0
    board.groups["g9-9"] = ghost
    assert refresh(board, snapshot_of(await world.queue.overview([]), ()), (), world.now_s)
    assert "g9-9" in board.groups
    assert refresh(board, snapshot_of(await world.queue.overview(["g9-9"]), ("g9-9",)), (), world.now_s)
    assert "g9-9" not in board.groups


async def test_the_machine_reads_all_groups_once_and_then_page_by_page() -> None:
    """All of them come in turn, those with returned requests first."""
    world = await filled(random.Random(4))
    pulled = await world.pull("a", (await world.queues())["a"][0], 2)
    await world.settle()
    world.calls.clear()
    back = [Owned(queue_id=each.queue_id, key=each.key, attempt=each.attempt) for each in pulled]
    await world.queue.requeue(world.agents["a"][0], back, RequeueCause.EVICTED, b"")
    await world.advance(3.0)
    pages = [call.group_ids for call in world.calls if isinstance(call, ReadOverview)]
    assert pages
    assert None not in pages
    assert pages[0] is not None
    assert pages[0][0] == pulled[0].group_id
    assert all(len(page) <= PAGE_GROUPS for page in pages if page is not None)
    assert {group for page in pages if page is not None for group in page} >= set((await world.queue.overview()).groups)


async def test_after_a_failed_call_all_groups_are_read() -> None:
    world = await filled(random.Random(5))
    world.calls.clear()
    world.faults = lambda call: "lost" if isinstance(call, ReadOverview) and call.group_ids is not None else ""
    await world.advance(3.0)
    pages = [call.group_ids for call in world.calls if isinstance(call, ReadOverview)]
    assert len(pages) > 1
    assert pages[1] is None


def test_where_models_are_is_no_part_of_the_key_of_terms() -> None:
    """Agents report it at each look; their heartbeats keep a slot up to date, so it counts only for an instance that is new here."""
    facts = InstanceFacts(name="a", incarnation="a/1", gpu="A10", n_gpu=1, engine="simulated", models=("m", "n", "o"))
    board = Board(slo_band=0)
    for active, warm, since_s in (("m", ("n",), 5.0), ("n", ("m", "o"), 0.0)):
        reported = replace(facts, active_model=active, warm_models=warm, loading_since_s=since_s)
        row = InstanceRow(facts=reported, alive=True)
        found = Snapshot(
            plan_version=0, unplaced=0, queues=(), groups={}, instances=(row,), incarnations={"a/1": True}, last_event_id=(0, 0)
        )
        board.load_slots(found, 10.0)
        slot = board.slots["a"]
        assert (slot.facts, slot.active_model, slot.warm_models) == (facts, "m", ("n",))
