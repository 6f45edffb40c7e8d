"""The queue's server is away for longer than a lease, or stands still: nothing is taken from an agent until it had a whole lease period
to return, and everything continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from qlm_core.vocabulary.errors import Unavailable
from qlm_planner.shell.process import PlannerShell
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue

from .test_planner_service.cluster import LEASE_S, SHORT_LEASE_S, Cluster, until


@pytest.fixture
async def cluster(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    queue = RedisQueue(server.url, "test", call_timeout_s=1.0)
    await queue.start()
    yield Cluster(url=server.url, folder=tmp_path, queue=queue, lease_s=SHORT_LEASE_S)
    await queue.stop()


async def away(server: EmbeddedServer, how: str, seconds: float = 1.5 * SHORT_LEASE_S) -> Callable[[], Awaitable[None]]:
    """Takes the server away, for longer than a lease unless `seconds` says otherwise; returns what brings it back."""
    if how == "paused":
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    else:
        await server.kill()
    end_s = time.monotonic() + seconds

    async def long_enough() -> bool:
        return time.monotonic() >= end_s

    await until(long_enough, "the time is over")

    async def back() -> None:
        if how == "paused":
            assert pid is not None
            os.kill(pid, signal.SIGCONT)
        else:
            await server.start()

    return back


async def answers(cluster: Cluster) -> bool:
    try:
        await cluster.queue.server_time_s()
    except Unavailable:
        return False
    return True


async def led(cluster: Cluster, shell: PlannerShell) -> None:
    async def leads() -> bool:
        return shell.term is not None and shell.term.caught_up.is_set()

    await until(leads, "it leads")


@pytest.mark.parametrize("how", ["paused", "killed"])
async def test_agents_have_a_lease_period_after_an_outage(cluster: Cluster, server: EmbeddedServer, how: str) -> None:
    """Every lease ran out meanwhile, the planner's too. All that the agent runs is taken, for it does not return, but not before a lease
    period is over."""
    async with cluster.agent("a") as incarnation, cluster.planner() as shell:
        await led(cluster, shell)
        await cluster.submit("mistral-7b", count=30)
        await until(cluster.all_placed, "placed")
        assert len(await cluster.pull("a", "mistral-7b", 20)) == 20
        back = await away(server, how)
        back_s = time.monotonic()
        await back()
        await until(lambda: answers(cluster), "it answers again")
        await cluster.join("b", "H100-80GB")

        async def taken() -> bool:
            left = len(await cluster.queue.owned(incarnation))
            assert left == 20 or time.monotonic() - back_s >= SHORT_LEASE_S, "taken before a lease period was over"
            return left == 0

        await until(taken, "taken back from the agent that is gone")

        async def moved() -> bool:
            return await cluster.waiting_on("b") == 30

        await until(moved, "and everything is with the other one")
        await cluster.submit("vicuna-13b", count=10)
        await until(cluster.all_placed, "it places as before")
        assert await cluster.serve("b") == 40


async def test_output_held_during_an_outage_is_written_after_it(cluster: Cluster, server: EmbeddedServer) -> None:
    """Owning a request needs no lease: the agent's has run out, and what it completes meanwhile counts."""
    async with cluster.agent("a"), cluster.planner() as shell:
        await led(cluster, shell)
        keys = await cluster.submit("mistral-7b", count=20)
        await until(cluster.all_placed, "placed")
        pulled = await cluster.pull("a", "mistral-7b", 20)
        back = await away(server, "paused")
        await back()
        await until(lambda: answers(cluster), "it answers again")
        await cluster.complete("a", pulled)
        assert await cluster.ended(keys)


async def test_a_short_silence_takes_nothing_from_anybody(cluster: Cluster, server: EmbeddedServer) -> None:
    """Shorter than what is left of a lease that is renewed in time: no lease is lost, nobody leads anew, nothing is requeued."""
    cluster.lease_s = LEASE_S
    async with cluster.agent("a") as incarnation, cluster.planner() as shell:
        await led(cluster, shell)
        term = shell.term
        await cluster.submit("mistral-7b", count=20)
        await until(cluster.all_placed, "placed")
        assert len(await cluster.pull("a", "mistral-7b", 20)) == 20
        for _ in range(3):
            back = await away(server, "paused", LEASE_S / 10)
            await back()
            await until(lambda: answers(cluster), "it answers again")
            await cluster.submit("vicuna-13b", count=5)
            await until(cluster.all_placed, "placed")
        assert shell.term is term
        assert len(await cluster.queue.owned(incarnation)) == 20
