"""`python -m qlm_estimator` as a process: ready line, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from qlm.api.v1 import estimator_pb2, estimator_pb2_grpc
from qlm_estimator.__main__ import main
from qlm_queue.embedded.server import EmbeddedServer

PATIENCE_S = 60.0
CONFIG = """
models: [{name: chat, profile: Mistral-7B}]
telemetry: {log_format: json}
"""


@asynccontextmanager
async def _process(tmp_path: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    path = tmp_path / "qlm.yaml"
    path.write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "qlm_estimator",
        "--config",
        str(path),
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("QLM_")},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _line(process: asyncio.subprocess.Process, event: str) -> dict[str, object]:
    """The next log line of an event."""
    assert process.stderr is not None
    seen = b""
    async with asyncio.timeout(PATIENCE_S):
        while line := await process.stderr.readline():
            seen += line
            if line.startswith(b"{") and json.loads(line)["event"] == event:
                found: dict[str, object] = json.loads(line)
                return found
    raise AssertionError(seen.decode())


async def test_ready_serves_and_stops_at_a_signal(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "state")
    url = await server.start()
    try:
        async with _process(tmp_path, "--name", "estimator-7", "--set", f"queue.url={url}") as process:
            ready = await _line(process, "ready")
            assert (ready["service"], ready["instance"]) == ("estimator", "estimator-7")
            assert ready["metrics_port"]
            async with grpc.aio.insecure_channel(str(ready["address"])) as channel:
                stub = estimator_pb2_grpc.EstimatorStub(channel)
                snapshot = await stub.GetProfiles(estimator_pb2.GetProfilesRequest(), timeout=PATIENCE_S)
            assert len(snapshot.hardware) == 10
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--set", "estimator.publish_every_s=0"), "estimator.publish_every_s"),
        (("--set", "estimator.colour=red"), "estimator.colour"),
        (("--set", "queue.url=redis://127.0.0.1:1", "--set", "models.chat.profile=Mistal-7B"), "models.chat.profile"),
        ((), "queue.url"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_wrong_settings_end_it_with_their_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    path = tmp_path / "qlm.yaml"
    path.write_text(CONFIG)
    assert main(["--config", str(path), *arguments]) == 2
    assert named in capsys.readouterr().err
