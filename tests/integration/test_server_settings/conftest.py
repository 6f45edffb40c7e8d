"""Servers whose settings, memory and disk a test changes."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from own_server import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH")
    server = Server(tmp_path)
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def server_on_a_small_disk(small_disk: Path) -> Iterator[Server]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on PATH")
    server = Server(small_disk)
    server.start()
    yield server
    server.stop(signal.SIGKILL)
