"""Mistakes of an operator, and faults of a machine: names given twice, signals at any moment, a state folder without room."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import qlm
from qlm_cli.options import default_config_path
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE
from qlm_process.cluster.state import ClusterState, ProcessState
from running_cluster import RunningCluster, gone, wait_until

pytestmark = pytest.mark.xdist_group("operations")

MODEL = "mistral-7b"
PAUSED = "vicuna-13b"
INSTANCE = "a100-0"
GRACE_S = 30.0
WORKERS = 8
ANSWER_TOKENS = 300
SECONDS_OF_TWO = 6.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    settings = {
        "agent.simulated.time_scale": "20",
        "agent.drain_finish_s": "0",  # a stopped agent gives back what it runs
        "agents": f"[{{name: {INSTANCE}, gpu: A100-80GB, models: [{MODEL}, {PAUSED}]}}]",
        "gateways": "[{name: gateway-0, listen: '127.0.0.1:0'}, {name: gateway-1, listen: '127.0.0.1:0'}]",
    }
    with RunningCluster(tmp_path_factory.mktemp("operations") / "cluster", settings) as running:
        yield running


def service(name: str, url: str, *settings: str) -> subprocess.Popen[str]:
    named = ("--name", INSTANCE) if name == "agent" else ()
    options = ["--config", default_config_path(), "--set", f"queue.url={url}", *named, *settings]
    command = [sys.executable, "-m", "qlm_cli", name, *options]
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


def test_a_pause_outlives_every_service_and_holds_up_nobody_else(cluster: RunningCluster) -> None:
    with qlm.Client(cluster.address) as client:

        def submit(request_id: str, **options: Any) -> None:
            client.submit(options.pop("model", MODEL), "Say something.", request_id=request_id, slo_s=60, max_tokens=20, **options)

        def completes(request_id: str, tenant: str = "default") -> bool:
            result = client.result(request_id, wait_s=60, tenant=tenant)
            return result is not None and result.state is qlm.RequestState.COMPLETED

        client.pause(model=PAUSED)
        client.pause(tenant="t")
        for number in range(20):
            submit(f"held{number}", model=PAUSED)
            submit(f"held{number}", tenant="t")
            submit(f"served{number}")
        assert all(completes(f"served{number}") for number in range(20))

        before = {process.pid for process in cluster.state.processes if process.service in ("planner", "estimator", "agent")}
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        cluster.wait_for(lambda state: state.ready and not before & {process.pid for process in state.processes})
        submit("after")
        assert completes("after")
        assert [(pause.model, pause.tenant) for pause in client.status().pauses] == [(PAUSED, ""), ("", "t")]
        waiting = client.requests(limit=500).requests
        assert len(waiting) == 40
        assert {(each.tenant, each.model) for each in waiting} == {("default", PAUSED), ("t", MODEL)}
        assert {each.attempts for each in waiting} == {0}

        client.resume(model=PAUSED)
        client.resume(tenant="t")
        for number in range(20):
            assert completes(f"held{number}"), cluster.log()
            assert completes(f"held{number}", "t"), cluster.log()


async def test_a_rolling_restart_of_all_services_and_the_server_under_load_loses_nothing(cluster: RunningCluster) -> None:
    addresses = [gateway.address for gateway in cluster.state.of("gateway")]
    streamed: dict[str, tuple[int, ...]] = {}
    stop = asyncio.Event()

    async def send(client: qlm.AsyncClient, worker: int) -> None:
        while not stop.is_set():
            request_id = f"w{worker}-{len(streamed)}"
            stream = client.generate(MODEL, [7, LENGTH_TOKEN_BASE + ANSWER_TOKENS], request_id=request_id, slo_s=60)
            streamed[request_id] = tuple([token async for chunk in stream for token in chunk.token_ids])

    async with qlm.AsyncClient(addresses) as client, asyncio.TaskGroup() as tasks:
        for worker in range(WORKERS):
            tasks.create_task(send(client, worker))
        for process in cluster.state.processes:
            before = len(streamed)
            os.kill(process.pid, signal.SIGTERM)
            await asyncio.to_thread(cluster.wait_for, partial(serves_anew, process))
            async with asyncio.timeout(GRACE_S):
                while len(streamed) < before + WORKERS:
                    await asyncio.sleep(0.01)
        stop.set()
    async with qlm.AsyncClient(addresses) as client:
        attempts = 0
        for request_id, tokens in streamed.items():
            result = await client.result(request_id, 60)
            assert result is not None, cluster.log()
            assert result.state is qlm.RequestState.COMPLETED
            assert (len(tokens), result.token_ids) == (ANSWER_TOKENS, tokens)
            attempts += result.attempts
        assert attempts > len(streamed), "some ran twice"
        assert (await client.status()).live == 0


def serves_anew(old: ProcessState, state: ClusterState) -> bool:
    """A process has been started again, and all serve."""
    return (
        state.ready and all(process.pid != old.pid for process in state.processes) and all(process.serving for process in state.processes)
    )


def test_a_state_folder_that_cannot_be_written_ends_no_cluster(cluster: RunningCluster) -> None:
    in_the_way = cluster.state_dir / "up.tmp"  # as good as a full disk: the state file cannot be written
    in_the_way.mkdir()
    agent = next(process for process in cluster.state.processes if process.service == "agent")
    os.kill(agent.pid, signal.SIGKILL)
    with qlm.Client(cluster.address) as client:
        client.submit(MODEL, "Say something.", request_id="unwritten", slo_s=60, max_tokens=40)
        result = client.result("unwritten", wait_s=60)
        assert result is not None
        assert result.state is qlm.RequestState.COMPLETED
    assert "state_not_written" in cluster.log()
    in_the_way.rmdir()
    os.kill(next(process.pid for process in cluster.state.processes if process.service == "estimator"), signal.SIGKILL)
    cluster.wait_for(lambda state: any(process.pid != agent.pid and process.service == "agent" for process in state.processes))


def test_a_killed_supervisor_takes_all_processes_along(cluster: RunningCluster) -> None:
    """The last one, for it ends the cluster of this module."""
    pids = cluster.pids
    assert cluster.interrupt(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: all(gone(pid) for pid in pids), GRACE_S, "all processes gone")
