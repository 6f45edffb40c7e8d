"""Queues on a Cluster: each on the node that serves its slot, and still whole when the slot moves to another."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.keys import Keys
from qlm_queue.redis.queue import RedisQueue
from queue_dump_redis import dump_redis
from small_cluster import SmallCluster

from .own_server import Server, acceptance, accepted_at_last, need_redis_server
from .redis_deployments import NODES, Cluster, execute

REQUESTS = 6


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Cluster]:
    need_redis_server()
    deployment = Cluster(tmp_path)
    try:
        await deployment.start()
        yield deployment
    finally:
        deployment.stop()


def names_of_each_node() -> list[str]:
    """Names of queues, of which each node serves one."""
    found: dict[int, str] = {}
    for number in range(1_000):
        found.setdefault(_slot(f"q{number}") * NODES // 16384, f"q{number}")
    return [found[node] for node in range(NODES)]


def _slot(name: str) -> int:
    return key_slot(Keys(name).prefix.encode())


async def _served_by(deployment: Cluster, name: str) -> list[Server]:
    return [node for node in deployment.nodes if await execute(node.port, "KEYS", f"{Keys(name).prefix}:*")]


async def test_each_queue_lives_on_the_node_of_its_slot(deployment: Cluster) -> None:
    for number, name in enumerate(names_of_each_node()):
        queue = RedisQueue(deployment.url, name)
        await queue.start()
        cluster = SmallCluster(queue, random.Random(number))
        await cluster.submit(REQUESTS)
        assert await cluster.finish()
        assert {await cluster.end_of(key) for key in cluster.keys} == {RequestState.COMPLETED}
        assert await _served_by(deployment, name) == [deployment.nodes[number]]
        await queue.stop()


async def test_a_queue_follows_its_slot_to_another_node(deployment: Cluster) -> None:
    """While it moves, no node has all its keys: nothing is read or written until one has."""
    name = names_of_each_node()[0]
    slot, (source, target, other) = _slot(name), deployment.nodes
    queue = RedisQueue(deployment.url, name)
    await queue.start()
    for number in range(REQUESTS):
        await queue.accept(acceptance(number))
    before = await dump_redis(queue)
    ids = {node: (await execute(node.port, "CLUSTER", "MYID")).decode() for node in deployment.nodes}
    await execute(target.port, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    await execute(source.port, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    keys = await execute(source.port, "CLUSTER", "GETKEYSINSLOT", slot, 1_000)
    half = len(keys) // 2
    for part in (keys[:half], keys[half:]):
        await execute(source.port, "MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", *part)
        for call in (queue.accept(acceptance(99)), queue.find(RequestKey("t0", "r0")), queue.overview()):
            with pytest.raises(Unavailable, match="server refuses"):  # nor is it taken for damaged
                await call
    for node in (target, source, other):
        await execute(node.port, "CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    await accepted_at_last(queue, 0)
    after = await dump_redis(queue)
    assert (after.requests, after.accepted_count) == (before.requests, before.accepted_count)
    assert await _served_by(deployment, name) == [target]
    await accepted_at_last(queue, REQUESTS)
    await queue.stop()


@pytest.mark.parametrize("url", ["redis+cluster://h:1/main", "redis+sentinel://h:1", "redis+ring://h:1", "redis+cluster://:1", "http://h"])
def test_an_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"queue\.url"):
        RedisQueue(url)
