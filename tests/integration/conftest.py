from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qlm_queue.embedded import EmbeddedServer


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A server of the test's own."""
    server = EmbeddedServer(tmp_path / "state")
    await server.start()
    yield server
    await server.stop()
