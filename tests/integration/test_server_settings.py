"""Settings that a queue's server must keep: evicting, full, changed and unlogged servers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio as redis
import structlog

from qlm_core.vocabulary.errors import ConfigError, QueueFull, Unavailable
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.redis.server_check import settings_problem, writes_problem
from qlm_queue.values import Durability
from small_cluster import SmallCluster

from .own_server import BODY_BYTES, START_S, Server, acceptance, accepted_at_last, filled


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH")
    server = Server(tmp_path)
    yield server
    server.stop(signal.SIGKILL)


async def fill_with_others(client: redis.Redis) -> None:
    for number in range(1_000):
        try:
            await client.set(f"other-{number}", b"x" * BODY_BYTES)
        except redis.ResponseError:
            return


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
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
    assert (await queue.accept(acceptance(0))).duplicate, "an accepted request is acknowledged again"
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


async def test_a_server_whose_log_is_deleted_takes_no_requests(server: Server, tmp_path: Path) -> None:
    server.start()
    queue = RedisQueue(server.url)
    await queue.start()
    await queue.accept(acceptance(0))
    (tmp_path / "appendonlydir").rename(tmp_path / "elsewhere")
    await asyncio.sleep(0.6)  # a reading of the server is kept so long
    with pytest.raises(Unavailable, match="log of writes is gone"):
        await queue.accept(acceptance(1))
    (tmp_path / "elsewhere").rename(tmp_path / "appendonlydir")
    await accepted_at_last(queue, 1)
    await queue.stop()


@pytest.mark.parametrize("denied", ["fcall", "config|get"])
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

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
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


async def test_nothing_is_acknowledged_whose_log_was_not_written(tmp_path: Path) -> None:
    """The size of a file is limited, as a full disk limits it; then the server is killed, and what it acknowledged is there."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH")
    server = Server(tmp_path, launcher=("sh", "-c", 'trap "" XFSZ; ulimit -f 400; exec "$@"', "sh"))
    server.start()
    queue = RedisQueue(server.url)
    await queue.start()
    acknowledged = []
    for number in range(40):
        try:
            await queue.accept(acceptance(number))
        except Unavailable:
            continue
        acknowledged.append(number)
    assert 0 < len(acknowledged) < 40
    await asyncio.sleep(0.6)  # a reading of the server is kept so long
    assert "log of writes" in await queue.refusal()
    await queue.stop()
    server.stop(signal.SIGKILL)
    again = Server(tmp_path)
    again.start()
    queue = RedisQueue(again.url)
    await queue.start()
    try:
        for number in acknowledged:
            assert await queue.find(RequestKey("t0", f"r{number}"))
    finally:
        await queue.stop()
        again.stop(signal.SIGKILL)


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
async def test_a_server_that_restarts_without_acknowledged_requests_is_reported(server: Server, tmp_path: Path, left: str) -> None:
    server.start()
    queue, other = RedisQueue(server.url), RedisQueue(server.url)
    await queue.start()
    await other.start()
    await queue.accept(acceptance(0))
    server.stop()
    shutil.copytree(tmp_path / "appendonlydir", tmp_path / "copy")
    server.start()
    await accepted_at_last(queue, 1)
    assert await queue.loss() == "", "it restarted with all"
    server.stop()
    shutil.rmtree(tmp_path / "appendonlydir")
    if left != "nothing":
        shutil.copytree(tmp_path / "copy", tmp_path / "appendonlydir")
    server.start()
    if left.endswith("since"):
        for number in (7, 8):
            await accepted_at_last(other, number)
    with structlog.testing.capture_logs() as logs:
        await accepted_at_last(queue, 2)  # it continues
        assert "has lost acknowledged requests" in await queue.loss()
        await queue.overview()
    assert [log["event"] for log in logs].count("queue_lost_requests") == 1
    server.stop()
    server.start()
    await accepted_at_last(queue, 3)
    await queue.stop()
    await other.stop()


async def test_a_reading_of_the_queue_notices_lost_requests(server: Server) -> None:
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
