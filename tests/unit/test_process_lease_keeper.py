"""Keeping a lease and winning a role, on the memory queue."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from qlm_core.vocabulary.errors import LeaseLost, Unavailable
from qlm_process.queue.leases import LeaseKeeper, RoleElection
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import PLANNER_ROLE, Bounds, Lease

TTL_S = 3.0
RENEW_S = 0.001
DEADLINE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class CountingQueue(MemoryQueue):
    """Counts renewals, and is away or broken on demand."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("q", Bounds(), clock)
        self.renewals = 0
        self.error: Exception | None = None

    async def renew_lease(self, lease: Lease, ttl_s: float, within_s: float | None = None) -> None:
        self.renewals += 1
        if self.error is not None:
            raise self.error
        await super().renew_lease(lease, ttl_s, within_s)


async def until_renewed(queue: CountingQueue, times: int) -> None:
    wanted = queue.renewals + times
    async with asyncio.timeout(DEADLINE_S):
        while queue.renewals < wanted:
            await asyncio.sleep(RENEW_S)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> CountingQueue:
    return CountingQueue(clock)


def election(queue: MemoryQueue, address: str) -> RoleElection:
    return RoleElection(queue, PLANNER_ROLE, address, ttl_s=TTL_S, renew_s=RENEW_S)


async def test_a_kept_lease_outlives_its_ttl_and_is_free_after_its_release(queue: CountingQueue, clock: Clock) -> None:
    keeper = await election(queue, "a:1").win()
    for _ in range(3):
        clock.now_s += 0.9 * TTL_S
        await until_renewed(queue, 2)
    assert not keeper.lost.is_set()
    assert await queue.leader_address(PLANNER_ROLE) == "a:1"
    await keeper.stop(release=True)
    await keeper.stop()
    second = await election(queue, "b:1").win()
    assert second.lease.fence > keeper.lease.fence
    await second.stop()


async def test_a_standby_wins_when_the_lease_expires_and_the_old_holder_learns_it(queue: CountingQueue, clock: Clock) -> None:
    first = await queue.acquire_lease(PLANNER_ROLE, "n", TTL_S, "a:1")
    assert first is not None
    standby = asyncio.create_task(election(queue, "b:1").win())
    await asyncio.sleep(0)
    assert not standby.done()
    clock.now_s += TTL_S + 1
    async with asyncio.timeout(DEADLINE_S):
        second = await standby
        old = LeaseKeeper(queue, first, ttl_s=TTL_S, renew_s=RENEW_S)
        await old.start()
        await old.lost.wait()
    assert not second.lost.is_set()
    await old.stop(release=True)
    assert await queue.leader_address(PLANNER_ROLE) == "b:1"
    await second.stop()


async def test_a_server_that_is_away_does_not_lose_a_lease(queue: CountingQueue) -> None:
    lease = await queue.acquire_lease(PLANNER_ROLE, "n", TTL_S, "a:1")
    assert lease is not None
    keeper = LeaseKeeper(queue, lease, ttl_s=TTL_S, renew_s=RENEW_S)
    queue.error = Unavailable("away")
    await keeper.start()
    await until_renewed(queue, 3)
    assert not keeper.lost.is_set()
    queue.error = None
    await until_renewed(queue, 2)
    queue.error = LeaseLost("taken")
    async with asyncio.timeout(DEADLINE_S):
        await keeper.lost.wait()
    await keeper.stop(release=True)


@pytest.mark.parametrize(
    ("ttl_s", "renew_s", "failed_after_s", "wanted"),
    [
        (3.0, 1.0, 1.0, [1.0, 0.0, 1.0]),
        (3.0, 1.0, 0.0, [1.0, 1.0, 1.0]),
        (1.0, 0.25, 0.375, [0.25, 0.0, 0.25]),
        (3.0, 2.0, 0.1, [2.0, 0.4, 2.0]),
    ],
    ids=["no answer in time", "refused at once", "no answer, a short lease", "refused, renewed late"],
)
async def test_a_failed_renewal_is_repeated_within_the_lease(
    clock: Clock, ttl_s: float, renew_s: float, failed_after_s: float, wanted: list[float]
) -> None:
    """A failed renewal and the next one have their time before the lease is over."""
    pauses: list[float] = []
    deadlines: list[float | None] = []
    over = asyncio.Event()

    class FailsOnceQueue(MemoryQueue):
        async def renew_lease(self, lease: Lease, ttl_s: float, within_s: float | None = None) -> None:
            deadlines.append(within_s)
            if len(deadlines) == 1:
                clock.now_s += failed_after_s
                raise Unavailable("no answer in time")
            await super().renew_lease(lease, ttl_s)

    async def sleep(seconds: float) -> None:
        pauses.append(round(seconds, 6))
        clock.now_s += seconds
        if len(pauses) == len(wanted):
            over.set()
            await asyncio.Event().wait()

    queue = FailsOnceQueue("q", Bounds(), clock)
    lease = await queue.acquire_lease(PLANNER_ROLE, "n", ttl_s, "a:1")
    assert lease is not None
    keeper = LeaseKeeper(queue, lease, ttl_s=ttl_s, renew_s=renew_s, sleep=sleep, monotonic=clock)
    await keeper.start()
    async with asyncio.timeout(DEADLINE_S):
        await over.wait()
    assert pauses == wanted
    assert deadlines == [(ttl_s - renew_s) / 2.0] * (len(wanted) - 1)
    assert not keeper.lost.is_set()
    await keeper.stop()


@pytest.mark.parametrize(
    ("asleep_s", "under_way_s", "fields"),
    [
        (4.5, 0.1, {"woke_late_s": 3.5, "answered_after_s": 0.1, "renewed_before_s": 4.6}),
        (1.0, 3.5, {"woke_late_s": 0.0, "answered_after_s": 3.5, "renewed_before_s": 4.5}),
    ],
    ids=["this process did not run", "the server answered late"],
)
async def test_a_loss_reports_where_time_passed(clock: Clock, asleep_s: float, under_way_s: float, fields: dict[str, float]) -> None:
    class SlowQueue(MemoryQueue):
        async def renew_lease(self, lease: Lease, ttl_s: float, within_s: float | None = None) -> None:
            clock.now_s += under_way_s
            await super().renew_lease(lease, ttl_s, within_s)

    async def sleep(seconds: float) -> None:
        assert seconds == 1.0
        clock.now_s += asleep_s

    queue = SlowQueue("q", Bounds(), clock)
    lease = await queue.acquire_lease(PLANNER_ROLE, "n", TTL_S, "a:1")
    assert lease is not None
    keeper = LeaseKeeper(queue, lease, ttl_s=TTL_S, renew_s=1.0, sleep=sleep, monotonic=clock)
    with capture_logs() as lines:
        await keeper.start()
        async with asyncio.timeout(DEADLINE_S):
            await keeper.lost.wait()
    await keeper.stop()
    (line,) = lines
    assert line["event"] == "lease_lost"
    assert {name: line[name] for name in fields} == fields


async def test_a_bug_in_renewing_is_loss_and_is_raised_at_the_stop(queue: CountingQueue) -> None:
    lease = await queue.acquire_lease(PLANNER_ROLE, "n", TTL_S, "a:1")
    assert lease is not None
    keeper = LeaseKeeper(queue, lease, ttl_s=TTL_S, renew_s=RENEW_S)
    queue.error = ZeroDivisionError("bug")
    await keeper.start()
    async with asyncio.timeout(DEADLINE_S):
        await keeper.lost.wait()
    with pytest.raises(ZeroDivisionError):
        await keeper.stop()
