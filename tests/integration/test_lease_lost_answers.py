"""Answers that get lost without a word, on a real server behind a wire: a lease outlives what broke one connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from qlm_core.vocabulary.errors import Unavailable
from qlm_process.queue.leases import LeaseKeeper, RoleElection
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import PLANNER_ROLE, Lease
from wire import Wire

TTL_S = 3.0
RENEW_S = 1.0
DEADLINE_S = 60.0


class NotingQueue(RedisQueue):
    """Notes how renewals ended, in their order."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.renewals: list[str] = []

    async def renew_lease(self, lease: Lease, ttl_s: float, within_s: float | None = None) -> None:
        try:
            await super().renew_lease(lease, ttl_s, within_s)
        except Exception as error:
            self.renewals.append(type(error).__name__)
            raise
        self.renewals.append("renewed")

    async def until(self, renewals: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.renewals) < renewals:
                await asyncio.sleep(0.01)


@pytest.fixture
async def wire(server: EmbeddedServer) -> AsyncIterator[Wire]:
    wire = await Wire(server.url).start()
    yield wire
    await wire.stop()


@pytest.fixture
async def queue(wire: Wire) -> AsyncIterator[NotingQueue]:
    queue = NotingQueue(wire.url)
    await queue.start()
    yield queue
    await queue.stop()


async def won(queue: NotingQueue) -> LeaseKeeper:
    return await RoleElection(queue, PLANNER_ROLE, "a:1", ttl_s=TTL_S, renew_s=RENEW_S).win()


async def test_a_lost_answer_does_not_cost_the_lease(queue: NotingQueue, wire: Wire) -> None:
    """The call timeout is 2 s: an answer awaited so long, after a pause of 1 s, arrives when the lease of 3 s is over."""
    keeper = await won(queue)
    await queue.until(1)
    wire.swallow_answers()
    with capture_logs() as lines:
        await queue.until(4)
    assert wire.swallowed > 0
    assert queue.renewals[:4] == ["renewed", "Unavailable", "renewed", "renewed"], "sent again at once, on another connection"
    (line,) = [line for line in lines if line["event"] == "lease_not_renewed"]
    assert (TTL_S - RENEW_S) / 2 <= line["answered_after_s"] < TTL_S - RENEW_S
    assert not keeper.lost.is_set()
    assert await queue.leader_address(PLANNER_ROLE) == "a:1"
    await keeper.stop(release=True)


async def test_other_calls_go_on_the_new_connection(queue: NotingQueue, wire: Wire) -> None:
    keeper = await won(queue)
    await queue.until(1)
    wire.swallow_answers()
    hanging = asyncio.create_task(queue.overview())
    await queue.until(3)
    assert (await queue.overview()).plan_version == 0
    with pytest.raises(Unavailable):  # by its own deadline: nothing is taken from what was under way
        await hanging
    await keeper.stop(release=True)


async def test_a_late_answer_to_a_renewal_is_nobody_elses(queue: NotingQueue, wire: Wire) -> None:
    """Cut for longer than a renewal has, and healed: late answers reach calls that are over, and those after them get their own."""
    keeper = await won(queue)
    await queue.until(1)
    wire.cut()
    await queue.until(2)
    wire.heal()
    async with asyncio.timeout(DEADLINE_S):
        while queue.renewals[-1] != "renewed":
            await asyncio.sleep(0.01)
        for _ in range(20):
            assert await queue.leader_address(PLANNER_ROLE) == "a:1"
    assert not keeper.lost.is_set()
    await keeper.stop(release=True)
