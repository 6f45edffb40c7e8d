"""What a queue's server must keep: changed settings, rights and roles, and servers that come back with less."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest
import redis.asyncio as redis
import structlog

from own_server import START_S, Server, acceptance, accepted_at_last
from qlm_core.errors import ConfigError, Unavailable
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.redis.server_check import writes_problem


@pytest.mark.parametrize("denied", ["fcall", "info", "config|get", "get"])
async def test_a_user_that_loses_a_right_is_refused_with_the_reason_until_it_has_it(server: Server, denied: str) -> None:
    server.start()
    client = redis.Redis.from_url(server.url)
    await client.execute_command("ACL", "SETUSER", "u", "on", ">p", "~*", "&*", "+@all")  # type: ignore[no-untyped-call]
    queue = RedisQueue(server.url.replace("://", "://u:p@"))
    await queue.start()
    await queue.accept(acceptance(0))
    await client.execute_command("ACL", "SETUSER", "u", f"-{denied}")  # type: ignore[no-untyped-call]
    await asyncio.sleep(0.6)
    with pytest.raises(Unavailable, match="no permissions"):
        await queue.accept(acceptance(1))
    with contextlib.suppress(Unavailable):
        await queue.overview()
    await client.execute_command("ACL", "SETUSER", "u", f"+{denied}")  # type: ignore[no-untyped-call]
    await accepted_at_last(queue, 1)
    await queue.stop()
    await client.aclose()


async def test_a_user_without_rights_or_another_protocol_ends_the_start_with_the_reason(server: Server) -> None:
    server.start()
    async with redis.Redis.from_url(server.url) as client:
        await client.execute_command("ACL", "SETUSER", "u", "on", ">p", "~*", "&*", "+@all", "-function")  # type: ignore[no-untyped-call]
        with pytest.raises(ConfigError, match="no permissions"):
            await RedisQueue(server.url.replace("://", "://u:p@")).start()

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        with pytest.raises(ConfigError, match="the server refuses it: Protocol error"):
            await RedisQueue(f"redis://127.0.0.1:{other.sockets[0].getsockname()[1]}/0").start()


@pytest.mark.parametrize(
    "settings",
    [("--appendfsync", "everysec"), ("--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"), ("--appendonly", "no")],
    ids=lambda settings: settings[-1],
)
async def test_settings_that_changed_with_a_restart_are_refused_until_they_hold(server: Server, settings: tuple[str, ...]) -> None:
    server.start()
    queue = RedisQueue(server.url)
    await queue.start()
    await queue.accept(acceptance(0))
    server.stop()
    server.start(*settings)
    with pytest.raises(Unavailable):  # at once, and after the reconnect with the reason
        await queue.accept(acceptance(1))
    reason = settings[-1] if settings[-1] != "no" else "appendonly no"
    async with asyncio.timeout(START_S):
        while True:  # the server may still be loading
            with pytest.raises(Unavailable) as refused:
                await queue.accept(acceptance(1))
            if reason in refused.value.message:
                break
            await asyncio.sleep(0.05)
    assert settings[-1] in await queue.refusal()
    server.stop()
    server.start()
    await accepted_at_last(queue, 1)
    await queue.stop()


async def test_a_setting_that_changes_under_a_connection_is_refused(server: Server) -> None:
    server.start()
    queue = RedisQueue(server.url)
    await queue.start()
    await queue.accept(acceptance(0))
    client = redis.Redis.from_url(server.url)
    await client.config_set("appendfsync", "everysec")
    await asyncio.sleep(0.6)
    with pytest.raises(Unavailable, match="everysec"):
        await queue.accept(acceptance(1))
    await client.config_set("appendfsync", "no")
    await accepted_at_last(queue, 1)
    await queue.stop()
    await client.aclose()


async def test_a_server_whose_snapshots_fail_takes_no_requests_until_one_succeeds(server: Server, tmp_path: Path) -> None:
    (tmp_path / "dump.rdb").mkdir()  # no file takes its place
    server.start("--save", "3600 1")
    queue = RedisQueue(server.url)
    await queue.start()
    await queue.accept(acceptance(0))
    client = redis.Redis.from_url(server.url)
    await snapshot(client)
    await asyncio.sleep(0.6)
    with pytest.raises(Unavailable, match="last snapshot failed"):
        await queue.accept(acceptance(1))
    assert "last snapshot failed" in await queue.refusal()
    (tmp_path / "dump.rdb").rmdir()
    await snapshot(client)
    await accepted_at_last(queue, 1)
    await queue.stop()
    await client.aclose()


async def snapshot(client: redis.Redis) -> None:
    await client.bgsave()
    while (await client.info("persistence"))["rdb_bgsave_in_progress"]:
        await asyncio.sleep(0.01)


def test_a_failed_snapshot_matters_where_the_server_stops_for_it() -> None:
    failed = {"role": "master", "rdb_last_bgsave_status": "err"}
    assert writes_problem({"save": "60 1", "stop-writes-on-bgsave-error": "yes"}, failed)
    assert writes_problem({}, failed)  # settings are hidden
    assert not writes_problem({"save": "", "stop-writes-on-bgsave-error": "yes"}, failed)
    assert not writes_problem({"save": "60 1", "stop-writes-on-bgsave-error": "no"}, failed)


async def test_a_server_that_becomes_a_replica_takes_no_requests_until_it_leads(server: Server) -> None:
    server.start()
    queue = RedisQueue(server.url)
    await queue.start()
    client = redis.Redis.from_url(server.url)
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")  # type: ignore[no-untyped-call]
    await asyncio.sleep(0.6)
    with pytest.raises(Unavailable, match="is a replica"):
        await queue.accept(acceptance(0))
    assert "is a replica" in await queue.refusal()
    assert (await queue.held())[0].held == 0
    await client.execute_command("REPLICAOF", "NO", "ONE")  # type: ignore[no-untyped-call]
    await accepted_at_last(queue, 0)
    await queue.stop()
    await client.aclose()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # connections that a killed server left
@pytest.mark.parametrize("left", ["nothing", "an old copy", "an old copy, and others came since"])
async def test_a_server_that_comes_back_without_what_it_acknowledged_is_reported(server: Server, tmp_path: Path, left: str) -> None:
    server.start()
    queue, other = RedisQueue(server.url), RedisQueue(server.url)
    await queue.start()
    await other.start()
    await queue.accept(acceptance(0))
    server.stop()
    shutil.copytree(tmp_path / "appendonlydir", tmp_path / "copy")
    server.start()
    await accepted_at_last(queue, 1)
    assert await queue.loss() == "", "it came back with all"
    server.stop()
    shutil.rmtree(tmp_path / "appendonlydir")
    if left != "nothing":
        shutil.copytree(tmp_path / "copy", tmp_path / "appendonlydir")
    server.start()
    if left.endswith("since"):
        for number in (7, 8):
            await accepted_at_last(other, number)
    with structlog.testing.capture_logs() as logs:
        await accepted_at_last(queue, 2)  # it goes on
        assert "has lost acknowledged requests" in await queue.loss()
        await queue.overview()
    assert [log["event"] for log in logs].count("queue_lost_requests") == 1
    server.stop()
    server.start()
    await accepted_at_last(queue, 3)
    await queue.stop()
    await other.stop()


async def test_a_look_at_the_queue_notices_what_a_server_lost(server: Server) -> None:
    server.start()
    queue, planner = RedisQueue(server.url), RedisQueue(server.url)
    await queue.start()
    await planner.start()
    await queue.accept(acceptance(0))
    await planner.overview()
    client = redis.Redis.from_url(server.url)
    await client.flushall()
    with structlog.testing.capture_logs() as logs:
        await planner.overview()
        await planner.overview()
    assert [log["event"] for log in logs] == ["queue_lost_requests"]
    await queue.stop()
    await planner.stop()
    await client.aclose()
