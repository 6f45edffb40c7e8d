"""The server that a queue's URL names: one host, or the primary that Sentinels or a Cluster name at the moment.

    redis://user:password@host:port/db            rediss:// with TLS, unix:// for a socket
    redis+sentinel://user:password@host:port,host:port/MASTER/db
    redis+cluster://user:password@host:port,host:port

Sentinel and Cluster take rediss+... too, and all take the client's options as a query (`?ssl_ca_certs=/etc/qlm/ca.pem`).
`sentinel_username` and `sentinel_password` are those of the Sentinels, which have users of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis.asyncio as redis
from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot

from qlm_core.vocabulary.errors import ConfigError

SENTINEL_PORT, SERVER_PORT = 26379, 6379
NODES_MAX = 64
"""Nodes of a Cluster that are remembered beside those of the URL."""
TRIES_IN_TIME = 4
"""Nodes that do not answer may be tried one after the other within the timeout of a call."""

Node = tuple[str, int]


class ServerAddress:
    """Makes connections to the server. `key`: one of the queue's, all of which are on one slot of a Cluster."""

    def __init__(self, url: str, key: str, call_timeout_s: float) -> None:
        """Raises ConfigError."""
        self._key = key
        self._timeout_s = call_timeout_s / TRIES_IN_TIME
        try:
            self._read(url)
        except ValueError as error:
            raise ConfigError(
                f"queue.url {url!r} must be a redis://, rediss:// or unix:// URL, or one of redis[s]+sentinel://HOST,HOST/MASTER "
                f"and redis[s]+cluster://HOST,HOST: {error}"
            ) from error
        self._options |= {"socket_connect_timeout": call_timeout_s, "retry": Retry(NoBackoff(), 0), "retry_on_error": [], "protocol": 2}
        self._class: Any = self._options.pop("connection_class", Connection)

    def _read(self, url: str) -> None:
        parts = urlsplit(url)
        scheme, _, self._kind = parts.scheme.partition("+")
        if self._kind not in ("", "sentinel", "cluster"):
            raise ValueError(f"unknown scheme {parts.scheme!r}")
        if not self._kind:
            self._options: dict[str, Any] = dict(parse_url(url))
            return
        user, at, hosts = parts.netloc.rpartition("@")
        self._named = tuple(_node(host, SENTINEL_PORT if self._kind == "sentinel" else SERVER_PORT) for host in hosts.split(","))
        self._nodes, self._turn = self._named, -1
        self._master, _, database = parts.path.strip("/").partition("/")
        if (self._kind == "sentinel") != bool(self._master):
            raise ValueError("Sentinels need the name of a master behind the hosts, and a Cluster has none")
        query = dict(parse_qsl(parts.query))
        self._sentinel = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        self._options = dict(parse_url(f"{scheme}://{user}{at}host/{database}?{urlencode(query)}"))
        del self._options["host"]

    async def connection(self) -> AbstractConnection:
        """A connection to the server, not connected. Raises the client's errors where it is not known."""
        connection: AbstractConnection = self._class(**await self._located())
        return connection

    async def client(self) -> redis.Redis:
        """A client of the server as it is now, for commands beside the queue's. Raises as `connection`."""
        return redis.Redis.from_pool(redis.ConnectionPool(connection_class=self._class, **await self._located()))

    async def _located(self) -> dict[str, Any]:
        if not self._kind:
            return self._options
        host, port = await (self._primary_by_sentinels() if self._kind == "sentinel" else self._owner_in_cluster())
        return {**self._options, "host": host, "port": port}

    async def _primary_by_sentinels(self) -> Node:
        """The newest configuration that the first majority of them knows: one that was cut off may still name the primary before."""
        options = {**self._options, **self._sentinel, "db": 0}
        tasks = [asyncio.create_task(self._ask(node, options, "SENTINEL", "MASTER", self._master)) for node in self._nodes]
        known: list[tuple[int, Node]] = []
        failure: Exception | None = None
        try:
            for answer in asyncio.as_completed(tasks):
                try:
                    flat = [item.decode() for item in await answer]
                except (redis.RedisError, OSError, TimeoutError) as error:
                    failure = error
                    continue
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                known.append((int(fields["config-epoch"]), (fields["ip"], int(fields["port"]))))
                if len(known) > len(tasks) // 2:
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not known:
            raise redis.ConnectionError(f"no Sentinel names the primary {self._master!r}: {failure}")
        return max(known)[1]

    async def _owner_in_cluster(self) -> Node:
        slot = key_slot(self._key.encode())
        failure: Exception | None = None
        for _ in range(TRIES_IN_TIME):
            self._turn += 1  # an answer may be out of date, so another node is tried next time
            node = self._nodes[self._turn % len(self._nodes)]
            try:
                ranges = await self._ask(node, {**self._options, "db": 0}, "CLUSTER", "SLOTS")
            except (redis.RedisError, OSError, TimeoutError) as error:
                failure = error
                continue
            members = {_node_in(member, node) for served in ranges for member in served[2:]} - set(self._named)
            self._nodes = (*self._named, *sorted(members)[:NODES_MAX])
            for first, last, primary, *_ in ranges:
                if first <= slot <= last:
                    return _node_in(primary, node)
            failure = redis.ConnectionError(f"nobody serves slot {slot}")
        raise redis.ConnectionError(f"no node of the Cluster names the server of slot {slot}: {failure}")

    async def _ask(self, node: Node, options: dict[str, Any], *command: str) -> Any:
        """One command on a connection of its own."""
        connection = self._class(**options, host=node[0], port=node[1])
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()
                await connection.send_command(*command)
                return await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)


def _node(text: str, default_port: int) -> Node:
    """Raises ValueError."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no host:port")
    return parts.hostname, parts.port or default_port


def _node_in(entry: Sequence[Any], answering: Node) -> Node:
    """A node in an answer to CLUSTER SLOTS; one that does not know its host has that of the answering node."""
    host = (entry[0] or b"").decode()
    return (host if host not in ("", "?") else answering[0]), int(entry[1])
