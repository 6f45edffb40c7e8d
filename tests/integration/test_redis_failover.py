"""Durability `replica` behind Sentinels: primaries are killed and stalled under load, and nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from qlm_core.vocabulary.errors import LeaseLost, NotFound, Unavailable
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import (
    PLANNER_ROLE,
    Completion,
    Durability,
    Emission,
    GroupPlacement,
    Lease,
    PullBudget,
    Pulled,
    RequestPlacement,
    StepStatus,
    TerminalRecord,
)
from queue_dump_redis import dump_redis

from .own_server import Server, acceptance, need_redis_server
from .redis_deployments import WAIT_S, Sentinels, execute

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # connections that a killed server left

FAILOVERS = int(os.environ.get("QLM_TEST_FAILOVERS", "2"))
WORKERS = 8
MORE = 100
"""Acknowledged requests before a failover, and after it."""
STALL_S = 0.3
PLANNER_TTL_S = 3_600.0
AGENT_TTL_S = 5.0
BUDGET = PullBudget(requests_max=16, kv_tokens=10**6, output_reserve_tokens=1)
PAUSE_S = 0.05
QUEUE = "failover"


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Sentinels]:
    need_redis_server()
    deployment = Sentinels(tmp_path)
    try:
        await deployment.start()
        yield deployment
    finally:
        deployment.stop()


def a_queue(deployment: Sentinels, durability: Durability = Durability.REPLICA) -> RedisQueue:
    return RedisQueue(deployment.url, QUEUE, durability=durability)


class Load:
    """Clients that send each request until it is accepted, and a planner with an agent that serves them."""

    def __init__(self, queue: RedisQueue) -> None:
        self._queue = queue
        self.accepted: set[int] = set()
        self.completed: set[int] = set()
        self.refused = 0
        self.waits_s: list[float] = []

    async def send(self, worker: int) -> None:
        for number in range(worker, 1_000_000, WORKERS):
            while number not in self.accepted:
                began_s = time.monotonic()
                try:
                    await self._queue.accept(acceptance(number, size=100))
                except Unavailable:
                    self.refused += 1
                    await asyncio.sleep(PAUSE_S)
                else:
                    self.accepted.add(number)
                    self.waits_s.append(time.monotonic() - began_s)

    async def serve(self) -> None:
        """A planner and an agent that start again, with new leases, wherever something is lost to them."""
        for life in range(1_000_000):
            with contextlib.suppress(Unavailable, LeaseLost):
                await self._live(f"{life}")
            await asyncio.sleep(PAUSE_S)

    async def _live(self, nonce: str) -> None:
        queue = self._queue
        planner = None
        while planner is None:
            planner = await queue.acquire_lease(PLANNER_ROLE, "p", PLANNER_TTL_S, "")
        _, agent = await queue.register("a", nonce, b"", AGENT_TTL_S)
        while True:
            await queue.renew_lease(agent, AGENT_TTL_S)
            for incarnation, alive in (await queue.overview()).incarnations.items():
                if not alive:
                    await queue.reclaim(planner, incarnation, b"")
            await self._place(planner)
            for request in (await queue.pull(agent, "m", BUDGET)).pulled:
                await self._complete(agent, request)

    async def _place(self, planner: Lease) -> None:
        found = await self._queue.read_unplaced("", 100)
        if found:
            group = GroupPlacement(group_id="g", instance="a", before="", first_deadline_s=100.0, meta={"model": "m"}, slo_least_s=9.0)
            wanted = [RequestPlacement(queue_id=request.queue_id, key=request.key, group_id="g") for request in found]
            await self._queue.place(planner, [group], wanted)

    async def _complete(self, agent: Lease, request: Pulled) -> None:
        last = Emission(queue_id=request.queue_id, key=request.key, attempt=request.attempt, offset=0, progress=b"", frame=b"f")
        done = Completion(last=last, state=RequestState.COMPLETED, result=request.queue_id.encode(), event=b"")
        if await self._queue.complete(agent.role, [done]) == [StepStatus.DONE]:
            self.completed.add(int(request.key.request_id[1:]))

    async def more(self, count: int) -> None:
        """Waits until so many more are accepted, and some more completed."""
        accepted, completed = len(self.accepted) + count, len(self.completed) + count // 10
        deadline_s = time.monotonic() + WAIT_S
        while len(self.accepted) < accepted or len(self.completed) < completed:
            assert time.monotonic() < deadline_s, (
                f"{len(self.accepted)} of {accepted} accepted, {len(self.completed)} of {completed} completed"
            )
            await asyncio.sleep(0.02)

    async def lost(self) -> tuple[set[int], set[int]]:
        """Requests that were acknowledged as accepted, or as completed, and are not."""
        accepted, completed = set(), set()
        for number in sorted(self.accepted):
            try:
                found = await self._queue.find(RequestKey("t0", f"r{number}"))
            except NotFound:
                accepted.add(number)
                continue
            if number in self.completed and not (isinstance(found, TerminalRecord) and found.result.startswith(found.queue_id.encode())):
                completed.add(number)
        return accepted, completed


async def fail_over(deployment: Sentinels) -> tuple[Server, float]:
    """Cuts the primary off from its replicas, which lack its last writes then, and kills it. Returns it, and the seconds until another
    leads."""
    primary, replicas = await deployment.primary(), await deployment.replicas()
    for replica in replicas:
        replica.send(signal.SIGSTOP)
    await execute(primary.port, "CLIENT", "KILL", "TYPE", "replica")  # else they find the writes in their sockets
    await asyncio.sleep(STALL_S)
    primary.stop(signal.SIGKILL)
    for replica in replicas:
        replica.send(signal.SIGCONT)
    began_s = time.monotonic()
    await deployment.another_leads(primary)
    return primary, time.monotonic() - began_s


async def under_load(deployment: Sentinels, queue: RedisQueue, failovers: int) -> Load:
    load = Load(queue)
    tasks = [asyncio.create_task(load.send(worker)) for worker in range(WORKERS)]
    tasks.append(asyncio.create_task(load.serve()))
    try:
        for _ in range(failovers):
            await load.more(MORE)
            killed, _ = await fail_over(deployment)
            await load.more(MORE)
            killed.start()  # without what makes it a replica: the Sentinels do that
            await deployment.whole()
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
    return load


@pytest.mark.timeout(60 + 120 * FAILOVERS)
async def test_failovers_under_load_lose_no_acknowledged_request(deployment: Sentinels) -> None:
    queue = a_queue(deployment)
    await queue.start()
    load = await under_load(deployment, queue, FAILOVERS)
    lost = await load.lost()
    waits_ms = sorted(1000 * wait_s for wait_s in load.waits_s)
    structlog.get_logger().info(
        "failovers_under_load",
        failovers=FAILOVERS,
        accepted=len(load.accepted),
        completed=len(load.completed),
        lost=[len(each) for each in lost],
        refused_meanwhile=load.refused,
        accept_p50_ms=round(waits_ms[len(waits_ms) // 2], 1),
    )
    assert lost == (set(), set())
    assert load.refused, "nobody noticed the failovers"
    assert len(load.completed) >= MORE // 10
    dump = await dump_redis(queue)
    keys = [*(request.key for request in dump.requests), *(terminal.key for terminal in dump.terminals)]
    assert len(keys) == len(set(keys)), "a request is there twice"
    assert {int(key.request_id[1:]) for key in keys} >= load.accepted
    assert await queue.loss() == ""
    await queue.stop()


async def test_a_stalled_replica_acknowledges_nothing(deployment: Sentinels) -> None:
    queue = a_queue(deployment)
    await queue.start()
    await queue.accept(acceptance(0))
    replicas = await deployment.replicas()
    for replica in replicas:
        replica.send(signal.SIGSTOP)
    answers = await asyncio.gather(*(queue.accept(acceptance(number)) for number in range(1, 20)), return_exceptions=True)
    assert all(isinstance(answer, Unavailable) and answer.retry_after_s for answer in answers), answers
    with pytest.raises(Unavailable):
        await queue.cancel(acceptance(0).key, b"")
    with pytest.raises(Unavailable):
        await queue.find(acceptance(0).key)  # cancelled, and so far only here
    for replica in replicas:
        replica.send(signal.SIGCONT)
    await deployment.whole()
    for number in range(20):
        await accepted(queue, number)
    assert len((await dump_redis(queue)).requests) == 19
    assert (await queue.find(acceptance(0).key)).state is RequestState.CANCELLED
    await queue.stop()


async def test_a_primary_that_wakes_up_behind_its_successor_acknowledges_nothing(deployment: Sentinels) -> None:
    queue, idle = a_queue(deployment), a_queue(deployment)
    await queue.start()
    await idle.start()
    await accepted(queue, 0)
    await accepted(idle, 1)
    primary = await deployment.primary()
    primary.send(signal.SIGSTOP)
    await deployment.another_leads(primary)
    await accepted(queue, 2)
    primary.send(signal.SIGCONT)  # and `idle` is still connected to it
    with contextlib.suppress(Unavailable):
        await idle.accept(acceptance(3))
        await queue.find(acceptance(3).key)  # NotFound, were it acknowledged by the one before
    await accepted(idle, 4)
    assert (await queue.find(acceptance(4).key)).state is RequestState.ACCEPTED
    await idle.stop()
    await queue.stop()


async def accepted(queue: RedisQueue, number: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            await queue.accept(acceptance(number))
        except Unavailable as error:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not within {WAIT_S} s") from error
            await asyncio.sleep(PAUSE_S)
        else:
            return
