"""Redis as it is run for availability: a primary with replicas and Sentinels, and a Cluster, each a plain process."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import redis.asyncio as redis

from .own_server import Server, free_port

WAIT_S = 60.0
DOWN_AFTER_MS = 1_000
NODES = 3
FAST_SYNC = ("--repl-diskless-sync-delay", "0", "--repl-timeout", "10")


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Waits, and tries again while nobody answers."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            if await condition():
                return
        except (redis.RedisError, OSError):
            pass
        assert time.monotonic() < deadline_s, f"not within {WAIT_S} s: {what}"
        await asyncio.sleep(0.05)


async def execute(port: int, *command: Any) -> Any:
    """One command to a server, answered as it writes it."""
    async with redis.Redis(port=port, protocol=2, socket_timeout=2.0) as client:
        client.response_callbacks.clear()
        return await client.execute_command(*command)  # type: ignore[no-untyped-call]


class Sentinels:
    """A primary, two replicas, and three Sentinels that call the primary `main`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.servers = [self._server(f"server-{number}") for number in range(3)]
        self._sentinels = [self._server(f"sentinel-{number}") for number in range(3)]
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self._sentinels)
        self.url = f"redis+sentinel://{hosts}/main"

    def _server(self, name: str) -> Server:
        (self._folder / name).mkdir(parents=True)
        return Server(self._folder / name)

    async def start(self) -> None:
        """Returns once every Sentinel knows all of them, so that a failover can begin."""
        primary = self.servers[0]
        primary.start(*FAST_SYNC)
        for replica in self.servers[1:]:
            replica.start(*FAST_SYNC, "--replicaof", f"127.0.0.1 {primary.port}")
        await until(lambda: self._follow(primary), "both replicas follow")
        for number, sentinel in enumerate(self._sentinels):
            file = self._folder / f"sentinel-{number}" / "sentinel.conf"
            file.write_text(
                f"port {sentinel.port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {primary.port} 2\n"
                f"sentinel down-after-milliseconds main {DOWN_AFTER_MS}\nsentinel failover-timeout main 5000\n"
            )
            sentinel.start_with(str(file), "--sentinel")
        for sentinel in self._sentinels:
            await until(lambda sentinel=sentinel: self._knows_all(sentinel), "a Sentinel knows all")  # type: ignore[misc]

    def stop(self) -> None:
        for server in (*self._sentinels, *self.servers):
            server.stop(signal.SIGKILL)

    async def primary(self) -> Server:
        """The one that most Sentinels name."""
        named = [(await execute(each.port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main"))[1] for each in self._sentinels]
        port = int(max(named, key=named.count))
        return next(server for server in self.servers if server.port == port)

    async def replicas(self) -> list[Server]:
        primary = await self.primary()
        return [server for server in self.servers if server is not primary]

    async def another_leads(self, than: Server) -> None:
        async def promoted() -> bool:
            primary = await self.primary()
            return primary is not than and b"role:master" in await execute(primary.port, "INFO", "replication")

        await until(promoted, "another server is promoted")

    async def whole(self) -> None:
        """All three are there again, and every Sentinel knows it."""

        async def ready() -> bool:
            primary = await self.primary()
            return await self._follow(primary) and all([await self._knows_all(each) for each in self._sentinels])

        await until(ready, "the replicas follow the primary")

    async def _follow(self, primary: Server) -> bool:
        return bool((await execute(primary.port, "INFO", "replication")).count(b"state=online") == 2)

    async def _knows_all(self, sentinel: Server) -> bool:
        flat = await execute(sentinel.port, "SENTINEL", "MASTER", "main")
        found = dict(zip(flat[::2], flat[1::2], strict=True))
        return (found[b"num-slaves"], found[b"num-other-sentinels"], found[b"flags"]) == (b"2", b"2", b"master")


class Cluster:
    """Three masters, each with a third of the slots."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[Server] = []
        for number in range(NODES):
            (folder / f"node-{number}").mkdir()
            self.nodes.append(Server(folder / f"node-{number}"))
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    async def start(self) -> None:
        bounds = [16384 * number // NODES for number in range(NODES + 1)]
        buses = [free_port() for _ in self.nodes]
        for node, bus, first, end in zip(self.nodes, buses, bounds, bounds[1:], strict=False):
            node.start("--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "2000")
            await execute(node.port, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node, bus in zip(self.nodes[1:], buses[1:], strict=True):
            await execute(self.nodes[0].port, "CLUSTER", "MEET", "127.0.0.1", node.port, bus)

        async def whole() -> bool:
            states = [await execute(node.port, "CLUSTER", "INFO") for node in self.nodes]
            return all(b"cluster_state:ok" in state and b"cluster_known_nodes:3" in state for state in states)

        await until(whole, "the Cluster is whole")

    def stop(self) -> None:
        for node in self.nodes:
            node.stop(signal.SIGKILL)
