"""Polls that read a page of the groups: their content and size, and that they forget nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from qlm_process.queue import polls as queue_polls
from qlm_process.queue.polls import WHOLE_EVERY_S, QueuePolls
from qlm_queue.overview import Overview
from qlm_queue.port import Queue

from .scenario import CANCELLED, ROOMY, Scenario, completion, key_of, segment

GROUPS = 40
PAGE = 12
NOW_S = 1_000.0


@dataclass
class Counted:
    """The queue under test; keeps what was read."""

    queue: Queue
    requested: list[Sequence[str] | None] = field(default_factory=list)

    async def overview(self, group_ids: Sequence[str] | None = None) -> Overview:
        self.requested.append(group_ids)
        return await self.queue.overview(group_ids)


@dataclass
class Watched:
    """Groups g0 to g39 with two requests each on instance "a", and their poller."""

    scene: Scenario
    counted: Counted
    polls: QueuePolls
    now_s: float = NOW_S

    async def poll(self, after_s: float = 0.1) -> Overview:
        self.now_s += after_s
        return await self.polls.poll(self.now_s)

    async def whole(self) -> Overview:
        return await self.counted.queue.overview()


@pytest.fixture
async def watched(scene: Scenario, monkeypatch: pytest.MonkeyPatch) -> Watched:
    for name, value in (("WHOLE_GROUPS", 8), ("PAGE_GROUPS", PAGE), ("TURN_GROUPS", 4)):
        monkeypatch.setattr(queue_polls, name, value)
    with scene.mirror.compared_at_the_end():
        for number in range(GROUPS):
            await scene.queue_up(f"g{number}", f"r{number}", f"s{number}", first_deadline_s=100.0 + number)
    counted = Counted(scene.mirror.real.queue)
    made = Watched(scene, counted, QueuePolls(counted))  # type: ignore[arg-type]
    assert await made.poll() == await made.whole()
    return made


async def test_a_page_is_read_and_all_groups_are_reported(watched: Watched) -> None:
    seen = await watched.poll()
    assert seen == await watched.whole()
    assert [None if page is None else len(page) for page in watched.counted.requested] == [None, PAGE]


async def test_groups_that_shrink_or_grow_are_reported_at_once(watched: Watched) -> None:
    """A group that is new is known by the next poll."""
    scene = watched.scene
    await scene.pull(1)
    await scene.accept("late")
    await scene.place("g39", "late", first_deadline_s=139.0)
    await scene.queue_up("new", "first", first_deadline_s=200.0)
    seen = await watched.poll()
    assert seen.groups["g0"].waiting == 1
    assert seen.groups["g39"].waiting == 3
    assert "new" not in seen.groups
    assert await watched.poll() == await watched.whole()


async def test_a_group_that_moves_and_one_that_drains_are_where_they_are(watched: Watched) -> None:
    """Also before their counts are read again."""
    scene = watched.scene
    await scene.register("b")
    await scene.apply(1, segment("b", 0, *(f"g{number}" for number in range(20, 30))), touching=("a", "b"))
    moved = (await watched.poll()).groups
    assert {group_id: group.instance for group_id, group in moved.items()} == {
        group_id: group.instance for group_id, group in (await watched.whole()).groups.items()
    }
    pulled = await scene.pull(6)
    assert list(pulled) == ["r0", "s0", "r1", "s1", "r2", "s2"]
    for _ in range(2):
        drained = await watched.poll()
    assert {name: group.live for name, group in drained.groups.items() if not group.instance} == {"g0": 2, "g1": 2, "g2": 2}
    await scene.mirror("complete", scene.incarnation, [completion(request) for request in pulled.values()])
    ended = await watched.poll()
    assert set(ended.groups) == set((await watched.whole()).groups) == {f"g{number}" for number in range(3, GROUPS)}


async def test_every_count_is_read_again_within_a_round(watched: Watched) -> None:
    """One in the middle, which nothing announces."""
    scene = watched.scene
    await scene.mirror("cancel", key_of("r20"), CANCELLED)
    rounds = 0
    while (await watched.poll()).groups["g20"].waiting == 2:
        rounds += 1
    assert rounds <= GROUPS / 4
    assert await watched.poll() == await watched.whole()


async def test_now_and_then_all_are_read(watched: Watched) -> None:
    """A group that opened and drained between two polls is in no queue."""
    scene = watched.scene
    await scene.register("b")
    await scene.queue_up("brief", "x", instance="b")
    await scene.mirror("pull", await scene.register("b"), "m", ROOMY)
    assert "brief" not in (await watched.poll()).groups
    assert (await watched.poll(WHOLE_EVERY_S)).groups["brief"].live == 1
    assert watched.counted.requested[-1] is None
    assert (await watched.poll(-2 * WHOLE_EVERY_S)) == await watched.whole()
    assert watched.counted.requested[-1] is None, "a clock that was set back"


async def test_few_groups_are_read_at_once(scene: Scenario) -> None:
    await scene.queue_up("g", "r")
    counted = Counted(scene.mirror.real.queue)
    polls = QueuePolls(counted)  # type: ignore[arg-type]
    for number in range(3):
        assert await polls.poll(NOW_S + number) == await counted.queue.overview()
    assert counted.requested == [None] * 3
