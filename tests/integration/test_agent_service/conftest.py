from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from qlm_queue.embedded.server import EmbeddedServer

from .rig import Rig


@pytest.fixture
async def rig(server: EmbeddedServer) -> AsyncIterator[Rig]:
    rig = Rig(server.url)
    await rig.start()
    yield rig
    await rig.stop()
