from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue

from .cluster import Cluster


@pytest.fixture
async def cluster(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    queue = RedisQueue(server.url, "test")
    await queue.start()
    yield Cluster(url=server.url, folder=tmp_path, queue=queue)
    await queue.stop()
