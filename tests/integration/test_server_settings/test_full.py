"""What a queue's server must keep: evicting and full servers."""

from __future__ import annotations

import random

import pytest
import redis.asyncio as redis

from own_server import Server, acceptance, accepted_at_last, fill_with_others, filled
from qlm_core.errors import ConfigError, QueueFull
from qlm_core.request import RequestKey, RequestState
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.redis.server_check import settings_problem
from qlm_queue.values import Durability
from small_cluster import SmallCluster


@pytest.mark.parametrize(
    "policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"]
)
async def test_an_evicting_server_is_refused_at_the_start(server: Server, policy: str) -> None:
    server.start("--maxmemory", "12mb", "--maxmemory-policy", policy)
    with pytest.raises(ConfigError, match=f"noeviction; it has {policy}"):
        await RedisQueue(server.url).start()


def test_a_policy_without_a_bound_evicts_nothing() -> None:
    settings = {"appendonly": "yes", "appendfsync": "no", "maxmemory": "0", "maxmemory-policy": "allkeys-lru"}
    assert not settings_problem(settings, Durability.PROCESS)
    assert "noeviction" in settings_problem({**settings, "maxmemory": "1"}, Durability.PROCESS)


async def test_a_full_server_refuses_new_requests_and_ends_those_it_has(server: Server) -> None:
    server.start("--maxmemory", "12mb", "--maxmemory-policy", "noeviction")
    queue = RedisQueue(server.url)
    await queue.start()
    cluster = SmallCluster(queue, random.Random(1))
    accepted, refused = await filled(queue)
    assert refused.details["bound"] == "memory"
    assert float(refused.details["retry_after_s"]) > 0
    assert "memory" in await queue.refusal()
    assert (await queue.accept(acceptance(0))).duplicate, "what was accepted is told again"
    cluster.keys = [RequestKey("t0", f"r{number}") for number in range(accepted)]
    assert await cluster.finish(rounds_max=1_000)
    assert {await cluster.end_of(key) for key in cluster.keys} == {RequestState.COMPLETED}
    await queue.stop()


async def test_leases_progress_and_results_fit_where_other_clients_filled_the_server(server: Server) -> None:
    server.start("--maxmemory", "12mb", "--maxmemory-policy", "noeviction")
    queue = RedisQueue(server.url)
    await queue.start()
    cluster = SmallCluster(queue, random.Random(1))
    await cluster.submit(20)
    client = redis.Redis.from_url(server.url)
    await fill_with_others(client)
    other = RedisQueue(server.url)
    await other.start()  # a process that starts now
    with pytest.raises(QueueFull):
        await other.accept(acceptance(99))
    assert await cluster.finish()
    await client.flushall()
    await accepted_at_last(other, 99)
    await other.stop()
    await queue.stop()
    await client.aclose()
