"""Damaged records: whatever is lost, cut or wrong in a queue, no call ends in another error than Unavailable, every other request
completes, and each damaged one ends."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping

import pytest
import redis.asyncio as redis
import structlog

from damage_memory import damage as damage_memory
from damage_redis import damage as damage_redis
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import Bounds
from queue_dump_memory import dump_memory
from queue_dump_redis import dump_redis
from small_cluster import SmallCluster

from .conftest import Servers
from .invariants import check_bytes
from .scenario import CANCELLED, acceptance, key_of

MEMORY_SEEDS = int(os.environ.get("QLM_DAMAGE_SEEDS", "50"))
SERVER_SEEDS = int(os.environ.get("QLM_DAMAGE_SERVER_SEEDS", "20"))
PAGE = 25
ENDS_OF_DAMAGED = (RequestState.FAILED, RequestState.EXPIRED, None)
"""Ends of a request whose own record was damaged: where it was cut, its expiry may have passed; its result may be what was lost."""
DAMAGES_MAX = 5


@pytest.fixture(autouse=True)
def quiet() -> object:
    with structlog.testing.capture_logs() as logs:
        yield logs


async def _queue_id(queue: RedisQueue, key: RequestKey) -> str:
    return (await queue.find(key)).queue_id


def _touched(name: str, what: str, ids: Mapping[str, RequestKey]) -> Iterable[RequestKey]:
    """The requests whose own record, body, output or result was damaged."""
    kind, *rest = name.split(":")
    match kind:
        case "req" | "result":
            return [RequestKey(*rest)]
        case "progress":
            return [ids[rest[0]]]
        case "queue":
            return [ids[what[6:]]] if what.startswith("entry ") else ids.values()
        case _:
            return []


async def _work(cluster: SmallCluster, chance: random.Random) -> None:
    await cluster.submit(4)
    for _ in range(chance.randrange(4)):
        await cluster.round()
        await cluster.submit(chance.randrange(3))


@pytest.mark.parametrize("first", range(0, MEMORY_SEEDS, PAGE))
async def test_a_damaged_memory_queue_serves_all_others(first: int, record_property: Callable[[str, object], None]) -> None:
    record_property("damaged memory", PAGE)
    for seed in range(first, first + PAGE):
        chance = random.Random(seed)
        queue = MemoryQueue("q", Bounds(attempts_max=100), lambda: 1_700_000_000.0)
        cluster = SmallCluster(queue, chance)
        await _work(cluster, chance)
        touched = {damage_memory(queue.state, chance) for _ in range(chance.randint(1, DAMAGES_MAX))}
        try:
            await cluster.submit(2)
            await cluster.finish()
            for key in cluster.keys:
                end = await cluster.end_of(key)
                assert end is RequestState.COMPLETED or (key.request_id in touched and end is RequestState.FAILED), (key, end)
            assert not await queue.repair(False)
            check_bytes(dump_memory(queue))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {touched}") from error


@pytest.mark.parametrize("lost", ["request", "results", "result", "all"])
async def test_a_repair_counts_bytes_again(lost: str, servers: Servers) -> None:
    url = servers.url("redis")
    client = redis.Redis.from_url(url, protocol=2)
    queue = RedisQueue(url, "repaired-bytes")
    await queue.start()
    try:
        for name in ("r1", "r2", "r3"):
            await queue.accept(acceptance(key_of(name)))
        await queue.cancel(key_of("r2"), CANCELLED)
        await queue.cancel(key_of("r3"), CANCELLED)
        match lost:
            case "request":
                await client.hset("{repaired-bytes}:req:default:r1", "b", "77")
            case "results":
                await client.delete("{repaired-bytes}:kept")
            case "result":
                await client.delete("{repaired-bytes}:result:default:r2")
            case _:
                await client.hset("{repaired-bytes}:counts", mapping={"b": "1", "bt:default": "2", "bc:gone": "-1"})
        assert await queue.repair(False)
        assert await queue.repair(True)
        assert not await queue.repair(False)
        check_bytes(await dump_redis(queue))
        await queue.cancel(key_of("r1"), CANCELLED)
        check_bytes(await dump_redis(queue))
    finally:
        await queue.stop()
        await client.unlink(*[key async for key in client.scan_iter(match="\\{repaired-bytes}:*")])
        await client.aclose()


async def test_a_key_of_another_type_is_mended_whatever_it_holds(servers: Servers) -> None:
    url, prefix = servers.url("redis"), "{damaged-types}"
    client = redis.Redis.from_url(url, protocol=2)
    queue = RedisQueue(url, "damaged-types")
    await queue.start()
    try:
        cluster = SmallCluster(queue, random.Random(1))
        await cluster.submit(4)
        await cluster.round()
        await client.hset(f"{prefix}:counts", "b", "1")
        assert await queue.repair(True)  # from here on there is a count of what was mended
        names = [name.decode() async for name in client.scan_iter(match=f"\\{prefix}:*")]
        assert f"{prefix}:damage_count" in names
        for name in names:
            string = await client.type(name) != b"string"
            await client.delete(name)
            await (client.set(name, "junk") if string else client.rpush(name, "junk"))
            assert await queue.repair(True), name
            assert not await queue.repair(False), name
            await queue.overview()
    finally:
        await queue.stop()
        await client.unlink(*[key async for key in client.scan_iter(match=f"\\{prefix}:*")])
        await client.aclose()


@pytest.mark.parametrize("first", range(0, SERVER_SEEDS, PAGE))
async def test_a_damaged_queue_on_a_server_serves_all_others(
    first: int, servers: Servers, record_property: Callable[[str, object], None]
) -> None:
    record_property("damaged server", min(PAGE, SERVER_SEEDS - first))
    counters = 0
    url = servers.url("redis")
    client = redis.Redis.from_url(url, protocol=2)
    for seed in range(first, min(first + PAGE, SERVER_SEEDS)):
        chance = random.Random(seed)
        name = f"damaged-{seed}"
        queue = RedisQueue(url, name, bounds=Bounds(attempts_max=100))
        await queue.start()
        cluster = SmallCluster(queue, chance)
        await _work(cluster, chance)
        prefix = "{" + name + "}"
        ids = {await _queue_id(queue, key): key for key in cluster.keys}
        done = [await damage_redis(client, prefix, chance) for _ in range(chance.randint(1, DAMAGES_MAX))]
        counters += sum(damaged.endswith((":counts", ":kept")) for damaged, _ in done)
        touched = {key for damaged, what in done for key in _touched(damaged[len(prefix) + 1 :], what, ids)}
        try:
            await cluster.submit(2)
            await cluster.finish()
            for key in cluster.keys:
                end = await cluster.end_of(key)
                assert end is RequestState.COMPLETED or (key in touched and end in ENDS_OF_DAMAGED), (key, end)
            assert not await queue.repair(False)
            check_bytes(await dump_redis(queue))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {done}") from error
        finally:
            await queue.stop()
            await client.unlink(*[key async for key in client.scan_iter(match=f"\\{prefix}:*")])
    record_property("damaged counters", counters)
    await client.aclose()
