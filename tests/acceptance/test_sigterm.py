"""SIGTERM at any moment after the start of each service: it ends within its grace, with no traceback. QLM_SIGTERM_RUNS: of each service
while it starts; half as many later."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from qlm_queue.embedded.server import EmbeddedServer

RUNS = int(os.environ.get("QLM_SIGTERM_RUNS", "2"))
SOON_S = 0.2
"""Before most of a process is there; the later signals arrive while it registers and serves."""
LATER_S = 4.0
GRACE_S = 30.0
"""The longest of the default settings: an agent's drain."""

CONFIG = """
queue: {{name: sigterm, url: "{url}"}}
models: [{{name: m, profile: Mistral-7B}}]
agents: [{{name: a, gpu: H100-80GB, drain_finish_s: 0}}]
"""
SERVICES = {"gateway": (), "planner": (), "estimator": (), "agent": ("--name", "a")}


@pytest.fixture
async def config(tmp_path: Path) -> AsyncIterator[Path]:
    """A cluster's file, whose server runs."""
    server = EmbeddedServer(tmp_path / "state")
    path = tmp_path / "qlm.yaml"
    path.write_text(CONFIG.format(url=await server.start()))
    yield path
    await server.stop()


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.timeout(60 + 2 * RUNS * (LATER_S + GRACE_S))
async def test_a_service_ends_on_sigterm_at_any_moment(service: str, config: Path, record_property: Callable[[str, object], None]) -> None:
    chance = random.Random(service)
    record_property(f"SIGTERM {service}", RUNS)
    for latest_s in [SOON_S] * RUNS + [LATER_S] * (RUNS // 2):
        after_s = chance.uniform(0.0, latest_s)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"qlm_{service}", "--config", str(config), *SERVICES[service]),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith("QLM_")},
        )
        try:
            await asyncio.sleep(after_s)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(GRACE_S):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        # Before it listens for the signal, that ends it.
        assert process.returncode in (0, -signal.SIGTERM), (after_s, said.decode())
        assert b"Traceback" not in said, (after_s, said.decode())
