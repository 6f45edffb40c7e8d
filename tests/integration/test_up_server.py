"""The server under the supervision of `qlm up`: killed, and killed again before it answers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import redis.asyncio as redis

from qlm_cli.up.config import UpSection
from qlm_cli.up.server import SupervisedServer
from qlm_core.vocabulary.errors import Unavailable
from qlm_process.settings import QueueSettings
from qlm_queue.embedded.server import ALLOCATOR_PACKAGE, EmbeddedServer, allocator_path

DEADLINE_S = 60.0
SETTINGS = UpSection(restart_backoff_s=0.05, restart_backoff_max_s=0.2, restarts_max=100)


def server_at(folder: Path, settings: UpSection = SETTINGS) -> SupervisedServer:
    return SupervisedServer(QueueSettings(state_dir=str(folder)), settings, lambda: None)


def kill(server: SupervisedServer) -> int:
    pid = server.state().pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    return pid


def holder_of(address: str) -> socket.socket:
    """A socket on the server's port, which nobody else can then listen on. The server must have been killed just before."""
    host, _, port = address.partition(":")
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    while True:
        try:
            holder.bind((host, int(port)))
        except OSError:
            continue  # the kernel has not taken it from the killed server yet; the test's timeout bounds this
        holder.listen()
        return holder


async def until_restarts(server: SupervisedServer, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while server.state().restarts < count or not server.state().serving:
            await asyncio.sleep(0.02)


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    server = server_at(tmp_path)
    await server.start()
    watching = asyncio.create_task(server.watch())
    try:
        address = server.state().address
        kill(server)
        with holder_of(address):
            await asyncio.sleep(2.5)  # a failed start takes a second: the port answers nothing
            assert not watching.done(), "one failed start must not end the supervision, and all of `qlm up` with it"
        await until_restarts(server, 1)
        assert server.state().address == address
    finally:
        await server.stop()
        await asyncio.wait([watching])
    watching.result()


async def test_it_gives_up_after_restarts_max(tmp_path: Path) -> None:
    server = server_at(tmp_path, SETTINGS.model_copy(update={"restarts_max": 2}))
    await server.start()
    watching = asyncio.create_task(server.watch())
    try:
        address = server.state().address
        kill(server)
        with holder_of(address), pytest.raises(Unavailable, match="ended 3 times"):
            async with asyncio.timeout(DEADLINE_S):
                await watching
    finally:
        await server.stop()


# The embedded server as it is started ---------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has loaded is read from /proc")
async def test_the_server_runs_with_the_allocator_of_its_package(tmp_path: Path) -> None:
    library = allocator_path()
    assert library is not None, f"{ALLOCATOR_PACKAGE} is not installed"
    server = EmbeddedServer(tmp_path)
    try:
        await server.start()
        assert str(Path(library).resolve()) in Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")
    finally:
        await server.stop()


async def test_the_server_is_reached_by_a_socket_where_its_folder_can_hold_one(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    for folder, scheme in ((tmp_path / "state", "unix://"), (deep, "redis://")):
        server = EmbeddedServer(folder)
        try:
            await server.start()
            await server.kill()  # its socket stays
            await server.start()
            assert server.local_url.startswith(scheme)
            for url in {server.local_url, server.url}:
                async with redis.Redis.from_url(url) as client:
                    assert await client.ping()
        finally:
            await server.stop()
