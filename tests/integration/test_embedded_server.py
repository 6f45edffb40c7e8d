"""The embedded server as it is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qlm_queue.embedded import allocator
from qlm_queue.embedded.server import EmbeddedServer


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has loaded is read from /proc")
async def test_the_server_runs_with_the_allocator_of_its_package(tmp_path: Path) -> None:
    library = allocator.preload()
    assert library is not None, f"{allocator.PACKAGE} is not installed"
    server = EmbeddedServer(tmp_path)
    try:
        await server.start()
        assert str(Path(library).resolve()) in Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")
    finally:
        await server.stop()
