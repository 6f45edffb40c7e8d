"""Backup and restore as docs/howto/operate.md has them: its commands, on real servers with real services."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import qlm
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE
from qlm_queue.embedded.server import server_arguments
from qlm_queue.values import Durability
from running_cluster import RunningCluster, wait_until

PAGE = Path(__file__).parents[2] / "docs/howto/operate.md"
MODEL = "mistral-7b"
PAUSED = "vicuna-13b"
COMMANDS_S = 60.0
START_S = 10.0
RUNNING_TOKENS = 6_000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_commands(name: str, folder: Path, **variables: int) -> None:
    """The block of the page that begins with this comment."""
    (block,) = re.findall(rf"```bash\n# {name}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    environment = {**os.environ, **{variable: str(value) for variable, value in variables.items()}}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMANDS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Ports of a running server and of one that a restore starts. Both are ended after the test."""
    for program in ("redis-server", "redis-cli"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on PATH")
    port, new_port = free_port(), free_port()
    server = subprocess.Popen(["redis-server", *server_arguments(port, tmp_path, Durability.PROCESS)], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(port), START_S, "the server")
        yield port, new_port
    finally:
        server.kill()
        server.wait(START_S)
        subprocess.run(["redis-cli", "-p", str(new_port), "shutdown", "nosave"], capture_output=True, timeout=START_S, check=False)


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def cluster_on(port: int, folder: Path) -> RunningCluster:
    return RunningCluster(folder, {"agent.simulated.time_scale": "4", "queue.url": f"redis://127.0.0.1:{port}/0"})


def test_live_requests_of_a_backup_complete_once_after_a_restore(ports: tuple[int, int], tmp_path: Path) -> None:
    port, new_port = ports
    waiting = [f"waits{number}" for number in range(20)]
    with cluster_on(port, tmp_path / "first") as cluster, qlm.Client(cluster.address) as client:
        client.pause(model=PAUSED)
        for name in waiting:
            client.submit(PAUSED, "Say something.", request_id=name, max_tokens=20)
        client.submit(MODEL, "Say something.", request_id="ended", max_tokens=5)
        ended = client.result("ended", 60)
        assert ended is not None
        with client.generate(
            MODEL, [7, LENGTH_TOKEN_BASE + RUNNING_TOKENS], request_id="runs", max_tokens=RUNNING_TOKENS, slo_s=600
        ) as stream:
            shown = next(stream).token_ids
            run_commands("back up", tmp_path, PORT=port)
        running = client.status("runs").request
        assert running is not None
        assert running.state is qlm.RequestState.RUNNING, "it was backed up in the middle"
        cluster.interrupt(signal.SIGTERM)
    run_commands("restore", tmp_path, NEW_PORT=new_port)
    with cluster_on(new_port, tmp_path / "second") as cluster, qlm.Client(cluster.address) as client:
        assert client.result("ended", 0) == ended
        assert [(pause.model, pause.tenant) for pause in client.status().pauses] == [(PAUSED, "")]
        client.resume(model=PAUSED)
        for name in [*waiting, "runs"]:
            result = client.result(name, 60)
            assert result is not None, cluster.log()
            assert (result.state, result.attempts) == (qlm.RequestState.COMPLETED, 2 if name == "runs" else 1)
            if name == "runs":
                assert result.output_tokens == RUNNING_TOKENS
                assert result.token_ids[: len(shown)] == shown
        assert client.status().live == 0
