"""A cluster of real processes serves on while records of its queue are damaged; `qlm doctor` reports and repairs them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import redis.asyncio as redis

import qlm
from damage_redis import damage
from running_cluster import RunningCluster

MODEL = "mistral-7b"
REQUESTS = 60
ANSWER_S = 60.0
SPARED = ("queue", "address")
"""The record of the queue itself; and a leader's address, which is written when it takes its lease."""
DAMAGES = 5


pytestmark = pytest.mark.xdist_group("damaged")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    settings = {
        "agent.simulated.time_scale": "20",
        "agents": "[{name: a100-0, gpu: A100-80GB, models: [mistral-7b]}, {name: a100-1, gpu: A100-80GB, models: [mistral-7b]}]",
    }
    with RunningCluster(tmp_path_factory.mktemp("damaged") / "cluster", settings) as running:
        yield running


def doctor(cluster: RunningCluster, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qlm_cli", "doctor", "--set", f"queue.state_dir={cluster.state_dir}", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def until_sound(cluster: RunningCluster) -> None:
    """Damaged records may have cost leaders their leases, which they take again."""
    deadline_s = time.monotonic() + ANSWER_S
    while (said := doctor(cluster).stdout) != "0 damaged\n":
        assert time.monotonic() < deadline_s, said


async def test_no_process_ends_and_all_others_complete(cluster: RunningCluster) -> None:
    chance = random.Random(7)
    pids = {process.name: process.pid for process in cluster.state.processes}
    client = redis.Redis.from_url(cluster.state.queue_url, protocol=2)
    with qlm.Client(cluster.address) as gateway:
        for number in range(REQUESTS):
            gateway.submit(MODEL, "Say something.", request_id=f"r{number}", slo_s=600, max_tokens=200)
        groups = [name async for name in client.scan_iter(match="{default}:group_meta:*")]
        await client.delete(*groups[:1])
        done = [(groups[0].decode(), "deleted"), *[await damage(client, "{default}", chance, spared=SPARED) for _ in range(DAMAGES)]]
        deadline_s = time.monotonic() + ANSWER_S
        states: dict[int, qlm.RequestState] = {}
        while len(states) < REQUESTS and time.monotonic() < deadline_s:
            if doctor(cluster, "--repair", "--no-copy").returncode > 1:
                break
            for number in range(REQUESTS):
                try:
                    result = gateway.result(f"r{number}", wait_s=0.0)
                except (qlm.errors.NotFound, qlm.errors.Unavailable):
                    continue
                if result is not None:
                    states[number] = result.state
    lost = [name for name, what in done if name.split(":")[1] in ("req", "result", "progress")]
    assert len([state for state in states.values() if state is qlm.RequestState.COMPLETED]) >= REQUESTS - len(lost), (done, states)
    assert {process.name: process.pid for process in cluster.state.processes} == pids, (done, cluster.log())
    await client.aclose()
    until_sound(cluster)


async def test_doctor_reports_damage_tries_on_a_copy_and_repairs(cluster: RunningCluster) -> None:
    until_sound(cluster)
    client = redis.Redis.from_url(cluster.state.queue_url, protocol=2)
    mending = [process.pid for role in ("planner", "gateway", "estimator", "agent") for process in cluster.state.of(role)]
    cluster.send(signal.SIGSTOP)
    for pid in mending:
        os.kill(pid, signal.SIGSTOP)  # all that read the queue mend it, perhaps between two commands of doctor
    try:
        await client.hset("{default}:counts", "live", "7")
        report = doctor(cluster)
        assert report.stdout.endswith("{default}:counts does not count what is there: counted again\n1 damaged\n"), report.stderr
        assert report.returncode == 1
        mended = doctor(cluster, "--repair")
        assert mended.stdout.splitlines()[-1] == "mended; 0 damaged now", mended.stderr
        async with client.pipeline(transaction=True) as both:  # no state of the deployment can be read
            both.delete("{default}:damage_count")
            _ = both.rpush("{default}:damage_count", "junk")
            await both.execute()
        unread = doctor(cluster, "--repair")
        assert unread.stdout.splitlines()[-1] == "mended; 0 damaged now", unread.stderr
        while not (found := doctor(cluster)).stdout.startswith("no planner leads"):  # until its lease is over
            assert found.stdout.splitlines()[-1] == "0 damaged", found.stderr
        assert (found.returncode, found.stdout.splitlines()[-1]) == (1, "0 damaged")
        assert not await client.hexists("{default}:counts", "live")
    finally:
        for pid in mending:
            os.kill(pid, signal.SIGCONT)
        cluster.send(signal.SIGCONT)
        await client.aclose()
