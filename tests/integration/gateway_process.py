"""Gateways as real processes on a test's server, and what can be seen of them from outside."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from .gateway_rig import MODEL, PATIENCE_S, Rig

START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A gateway that is ready."""

    process: asyncio.subprocess.Process
    address: str
    http_url: str
    metrics_port: int

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def metric(self, name: str) -> float:
        """A sample without labels of its metrics endpoint."""

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=PATIENCE_S) as answer:
                return str(answer.read().decode())

        lines = (await asyncio.to_thread(scrape)).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@asynccontextmanager
async def gateway_process(rig: Rig, folder: Path, *, context_tokens_max: int = 8_192, **settings: object) -> AsyncIterator[GatewayProcess]:
    """Starts a gateway with these settings of its section, and kills it at the end if it still runs."""
    config = folder / "qlm.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "queue": {"name": "test", "url": rig.server.url},
                "models": [{"name": MODEL, "profile": "Mistral-7B", "context_tokens_max": context_tokens_max}],
                "gateways": [{"name": "gateway-0", "listen": "127.0.0.1:0", "drain_grace_s": 0.2, **settings}],
                "telemetry": {"log_format": "json"},
            }
        )
    )
    command = (sys.executable, "-m", "qlm_gateway", "--config", str(config), "--name", "gateway-0")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        ready = await asyncio.wait_for(_ready(process), START_TIMEOUT_S)
        yield GatewayProcess(process, str(ready["address"]), str(ready["http"]), int(str(ready["metrics_port"])))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _ready(process: asyncio.subprocess.Process) -> dict[str, object]:
    assert process.stderr is not None
    async for line in process.stderr:
        with suppress(json.JSONDecodeError):
            event: dict[str, object] = json.loads(line)
            if event["event"] == "ready":
                return event
    raise AssertionError("the gateway ended")
