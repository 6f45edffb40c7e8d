from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qlm_queue.embedded import EmbeddedServer

from .rig import Rig


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "state")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def rig(server: EmbeddedServer) -> AsyncIterator[Rig]:
    rig = Rig(server.url)
    await rig.start()
    yield rig
    await rig.stop()
