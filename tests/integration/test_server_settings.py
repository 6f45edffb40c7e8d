"""What a queue's server must keep: evicting, full, changed and unlogged servers."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest
import redis.asyncio as redis
import structlog

from qlm.api.v1.request_pb2 import Request
from qlm_core.errors import ConfigError, QueueFull, Unavailable
from qlm_core.request import RequestKey, RequestState
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.redis.server_check import settings_problem, writes_problem
from qlm_queue.values import Acceptance, Durability
from small_cluster import SmallCluster

START_S = 10.0
MEBIBYTE = 1 << 20
BODY_BYTES = 20_000


class Server:
    """A redis-server of one's own, which may be started anew with other settings."""

    def __init__(self, folder: Path, launcher: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._launcher = launcher
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def start(self, *settings: str) -> None:
        always = ["--port", str(self._port), "--dir", str(self._folder), "--save", "", "--appendonly", "yes", "--appendfsync", "no"]
        self._process = subprocess.Popen(
            [*self._launcher, "redis-server", *always, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("the server does not answer")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(START_S)
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH")
    server = Server(tmp_path)
    yield server
    server.stop(signal.SIGKILL)


def acceptance(number: int, size: int = BODY_BYTES) -> Acceptance:
    body = Request(model="m", text="x" * size).SerializeToString()
    digest = blake2b(body, digest_size=16).digest()
    return Acceptance(key=RequestKey("t0", f"r{number}"), body=body, digest=digest, gateway="", slo_class="8s", prompt_tokens=9)


async def accepted_at_last(queue: RedisQueue, number: int) -> None:
    """Within some seconds."""
    deadline_s = time.monotonic() + 5.0
    while True:
        try:
            await queue.accept(acceptance(number))
        except (QueueFull, Unavailable):
            assert time.monotonic() < deadline_s, await queue.refusal()
            await asyncio.sleep(0.05)
        else:
            return


async def filled(queue: RedisQueue) -> tuple[int, QueueFull]:
    """Accepts until it is refused, with pauses as long as a look at the server is kept."""
    for number in range(1_000):
        try:
            await queue.accept(acceptance(number))
        except QueueFull as error:
            return number, error
        if number % 20 == 19:
            await asyncio.sleep(0.5)
    raise AssertionError("it is never full")


async def fill_with_others(client: redis.Redis) -> None:
    for number in range(1_000):
        try:
            await client.set(f"other-{number}", b"x" * BODY_BYTES)
        except redis.ResponseError:
            return


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
    await asyncio.sleep(0.6)  # a look at the server is kept so long
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
