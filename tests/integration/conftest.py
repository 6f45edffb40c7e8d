from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qlm_queue.embedded.server import EmbeddedServer

from .gateway_rig import Rig, open_rig


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A server of the test's own."""
    server = EmbeddedServer(tmp_path / "state")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A queue of the test's own, and what opens gateways on it."""
    async with open_rig(tmp_path) as opened:
        yield opened
