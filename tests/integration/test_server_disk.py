"""A server whose log of writes shares a small disk: its bound, a disk that others fill, and one without room."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio as redis

from qlm_core.vocabulary.errors import QueueFull, Unavailable
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.redis.server_check import full_bound, rewrite_helps
from qlm_queue.values import Bounds
from small_cluster import SmallCluster

from .own_server import BODY_BYTES, MEBIBYTE, Server, acceptance, accepted_at_last, filled


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def server_on_a_small_disk(small_disk: Path) -> Iterator[Server]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH")
    server = Server(small_disk)
    server.start()
    yield server
    server.stop(signal.SIGKILL)


async def test_a_log_that_takes_its_share_of_the_disk_stops_acceptance_alone(server_on_a_small_disk: Server) -> None:
    queue = RedisQueue(server_on_a_small_disk.url)
    await queue.start()
    cluster = SmallCluster(queue, random.Random(1))
    accepted, refused = await filled(queue, 10 * BODY_BYTES)
    assert refused.details["bound"] == "disk"
    assert float(refused.details["retry_after_s"]) > 0
    assert "of disk" in await queue.refusal()
    cluster.keys = [RequestKey("t0", f"r{number}") for number in range(accepted)]
    await cluster.round()
    with pytest.raises(QueueFull):
        await queue.accept(acceptance(1_000))
    assert await cluster.finish(rounds_max=1_000)
    assert {await cluster.end_of(key) for key in cluster.keys} == {RequestState.COMPLETED}
    await accepted_at_last(queue, 1_000)  # what has ended is out of the log
    client = redis.Redis.from_url(server_on_a_small_disk.url)
    assert (await client.info("persistence"))["aof_current_size"] < 12 * MEBIBYTE
    await client.aclose()
    await queue.stop()


async def test_a_disk_that_others_fill_stops_acceptance_until_there_is_room(server_on_a_small_disk: Server, small_disk: Path) -> None:
    queue = RedisQueue(server_on_a_small_disk.url)
    await queue.start()
    cluster = SmallCluster(queue, random.Random(1))
    for number in range(30):
        await queue.accept(acceptance(number))
        cluster.keys.append(RequestKey("t0", f"r{number}"))
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free - 25 * BODY_BYTES))
    await asyncio.sleep(0.6)  # a reading of the server is kept so long
    with pytest.raises(QueueFull):
        await queue.accept(acceptance(100))
    assert await cluster.finish()
    (small_disk / "other").unlink()
    await accepted_at_last(queue, 100)
    await queue.stop()


async def test_a_disk_without_any_room_loses_nothing_that_was_acknowledged(server_on_a_small_disk: Server, small_disk: Path) -> None:
    server = server_on_a_small_disk
    queue = RedisQueue(server.url)
    await queue.start()
    await queue.accept(acceptance(0))
    with contextlib.suppress(OSError), (small_disk / "other").open("wb", buffering=0) as other:
        while other.write(bytes(MEBIBYTE)):
            pass
    assert not shutil.disk_usage(small_disk).free
    acknowledged = [0]
    for number in range(1, 60):
        try:
            await queue.accept(acceptance(number))
        except (QueueFull, Unavailable):
            continue
        acknowledged.append(number)
    assert len(acknowledged) < 60
    await asyncio.sleep(0.6)
    assert "log of writes" in await queue.refusal()
    server.stop(signal.SIGKILL)
    (small_disk / "other").unlink()
    server.start()
    await accepted_at_last(queue, 60)
    for number in acknowledged:
        assert await queue.find(RequestKey("t0", f"r{number}"))
    await queue.stop()


def test_a_log_is_rewritten_where_that_frees_half_of_it_and_fits() -> None:
    bounds = Bounds()
    log = {"used_memory": 1, "aof_current_size": 100, "used_memory_dataset": 50}
    assert full_bound(log, 98, bounds) == ("disk", 99, 100)
    assert full_bound(log, 101, bounds) is None
    assert full_bound(log, None, bounds) is None
    assert rewrite_helps(log, 99, bounds)
    assert not rewrite_helps(log, 101, bounds)
    assert not rewrite_helps(log, 50, bounds)
    assert not rewrite_helps({**log, "used_memory_dataset": 51}, 99, bounds)
    assert not rewrite_helps({**log, "aof_rewrite_in_progress": 1}, 99, bounds)
