"""The version of a queue's data on a real server: written by the first, and a build of another version refuses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress

import pytest
import redis.asyncio as redis

from qlm_cli.options import default_config_path
from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.keys import Keys
from qlm_queue.redis.address import ServerAddress
from qlm_queue.redis.calls import DATA_VERSION
from qlm_queue.redis.link import RedisLink
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.redis.scripts import Library, library_source

NAME = "versioned"
KEY = Keys(NAME)("version")
REFUSAL = "queue 'versioned' holds data of version {} and this build uses version {}: run a build of version {}"
START_S = 60.0


async def test_the_first_build_writes_its_version_and_another_refuses(server: EmbeddedServer) -> None:
    first, same = RedisQueue(server.url, NAME), RedisQueue(server.url, NAME)
    for queue in (first, same):
        await queue.start()
    newer = RedisQueue(server.url, NAME, data_version=DATA_VERSION + 1)
    with pytest.raises(ConfigError) as refused:
        await newer.start()
    assert refused.value.message.startswith(REFUSAL.format(DATA_VERSION, DATA_VERSION + 1, DATA_VERSION))
    other = RedisQueue(server.url, "another", data_version=DATA_VERSION + 1)
    await other.start()
    for queue in (first, same, other):
        await queue.stop()


async def test_a_start_deletes_the_functions_of_other_builds_and_a_process_of_one_loads_its_own_again(server: EmbeddedServer) -> None:
    library = Library(library_source() + "-- another build")
    queue, other = RedisQueue(server.url, NAME), RedisLink(ServerAddress(server.url, NAME, 5.0), library, 5.0)
    await queue.start()
    async with redis.Redis.from_url(server.url) as client:
        await client.function_load("#!lua name=foreign\nredis.register_function('foreign', function() return 1 end)", True)
        await other.start()
        assert await libraries(client) == {"foreign", library.name}
        await queue.overview()
        assert await libraries(client) == {"foreign", library.name, Library(library_source()).name}
    await other.stop()
    await queue.stop()


async def libraries(client: redis.Redis) -> set[str]:
    return {answer[1].decode() for answer in await client.function_list()}


async def test_data_that_changes_behind_a_connection_is_refused_at_the_reconnect(server: EmbeddedServer) -> None:
    queue = RedisQueue(server.url, NAME)
    await queue.start()
    await queue.overview()
    async with redis.Redis.from_url(server.url) as client:
        await client.set(KEY, DATA_VERSION + 1)
    await server.stop()
    await server.start()
    async with redis.Redis.from_url(server.url) as client:
        with suppress(Unavailable):  # the first call may only find that the connection is gone
            await queue.overview()
        with pytest.raises(Unavailable, match=f"holds data of version {DATA_VERSION + 1}"):
            await queue.overview()
        await client.set(KEY, DATA_VERSION)
        await queue.overview()
    await queue.stop()


@pytest.mark.parametrize("damage", ["missing", "of another type", "no number"])
async def test_a_damaged_version_is_written_anew(server: EmbeddedServer, damage: str) -> None:
    async with redis.Redis.from_url(server.url) as client:
        if damage == "of another type":
            await client.hset(KEY, "a", "b")
        elif damage == "no number":
            await client.set(KEY, "junk")
        queue = RedisQueue(server.url, NAME)
        await queue.start()
        assert await client.get(KEY) == str(DATA_VERSION).encode()
        await queue.stop()


async def test_a_full_server_without_a_version_is_used(server: EmbeddedServer) -> None:
    async with redis.Redis.from_url(server.url) as client:
        first = RedisQueue(server.url, NAME)
        await first.start()
        await first.stop()
        await client.delete(KEY)
        await client.config_set("maxmemory", 1)
        await first.start()
        await first.overview()
        await client.config_set("maxmemory", 0)
        await first.stop()


@pytest.mark.parametrize("service", ["gateway", "planner", "agent"])
async def test_every_service_ends_with_the_sentence(server: EmbeddedServer, service: str) -> None:
    async with redis.Redis.from_url(server.url) as client:
        await client.set(KEY, 9_999)
    settings = [f"queue.url={server.url}", f"queue.name={NAME}", *(["gateway.listen=127.0.0.1:0"] if service == "gateway" else [])]
    named = ["--name", "a100-0"] if service == "agent" else []
    options = ["--config", default_config_path(), *named, *(part for setting in settings for part in ("--set", setting))]
    command = [sys.executable, "-m", "qlm_cli", service, *options]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert REFUSAL.format(9_999, DATA_VERSION, 9_999) in done.stdout + done.stderr
