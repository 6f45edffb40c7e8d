"""What an operator does wrong, or a machine does to a cluster: names given twice, signals at any moment, a state folder without room."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import qlm
from qlm.cli.options import default_config_path
from qlm_queue.embedded import EmbeddedServer
from running_cluster import RunningCluster

MODEL = "mistral-7b"
INSTANCE = "a100-0"
GRACE_S = 30.0
SECONDS_OF_TWO = 6.0
MOMENTS_MS = (0, 10, 40, 120)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    agents = f"[{{name: {INSTANCE}, gpu: A100-80GB, models: [{MODEL}]}}]"
    with RunningCluster(tmp_path / "cluster", {"agent.simulated.time_scale": "20", "agents": agents}) as running:
        yield running


def service(name: str, url: str, *settings: str) -> subprocess.Popen[str]:
    named = ("--name", INSTANCE) if name == "agent" else ()
    options = ["--config", default_config_path(), "--set", f"queue.url={url}", *named, *settings]
    command = [sys.executable, "-m", "qlm.cli", name, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_of_two_agents_of_one_name_the_later_one_yields_and_says_so(cluster: RunningCluster) -> None:
    later = service("agent", cluster.state.queue_url)
    try:
        assert later.stdout is not None
        while "registered" not in (line := later.stdout.readline()):
            assert line, "it ended"
        ends_s = time.monotonic() + SECONDS_OF_TWO
        attempts: list[int] = []
        with qlm.Client(cluster.address) as client:
            while time.monotonic() < ends_s:
                request_id = f"r{len(attempts)}"
                client.submit(MODEL, "Say something.", request_id=request_id, slo_s=60, max_tokens=400)
                result = client.result(request_id, wait_s=60)
                assert result is not None
                assert result.state is qlm.RequestState.COMPLETED
                attempts.append(result.attempts)
    finally:
        later.kill()
        said = later.communicate()[0]
    assert sum(attempts) <= len(attempts) + 4, attempts  # each takes it from the other once
    assert "another process serves instance" in said, said + cluster.log()


@pytest.mark.parametrize("name", ["gateway", "planner", "estimator", "agent"])
async def test_a_signal_stops_a_service_at_any_moment(name: str, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    url = await server.start()
    processes = [service(name, url, *(("--set", "gateway.listen=127.0.0.1:0") if name == "gateway" else ())) for _ in range(2)]
    try:
        for moment_ms in MOMENTS_MS:
            process = processes.pop(0)
            assert process.stdout is not None
            while " ready " not in (line := process.stdout.readline()):
                assert line, "it ended"
            processes.append(service(name, url, *(("--set", "gateway.listen=127.0.0.1:0") if name == "gateway" else ())))
            await asyncio.sleep(moment_ms / 1000)
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=GRACE_S)
            assert process.returncode == 0, rest
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        await server.stop()


def test_a_state_folder_that_cannot_be_written_ends_no_cluster(cluster: RunningCluster) -> None:
    in_the_way = cluster.state_dir / "up.tmp"  # as good as a full disk: the state file cannot be written
    in_the_way.mkdir()
    agent = next(process for process in cluster.state.processes if process.service == "agent")
    os.kill(agent.pid, signal.SIGKILL)
    with qlm.Client(cluster.address) as client:
        client.submit(MODEL, "Say something.", request_id="r", slo_s=60, max_tokens=40)
        result = client.result("r", wait_s=60)
        assert result is not None
        assert result.state is qlm.RequestState.COMPLETED
    assert "state_not_written" in cluster.log()
    in_the_way.rmdir()
    os.kill(next(process.pid for process in cluster.state.processes if process.service == "estimator"), signal.SIGKILL)
    cluster.wait_for(lambda state: any(process.pid != agent.pid and process.service == "agent" for process in state.processes))
