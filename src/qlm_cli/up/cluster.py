"""All processes of `qlm up`: the order in which they start and stop, and the state file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from qlm.credentials import Credentials
from qlm_cli.up.child import Child, Phase
from qlm_cli.up.config import UpConfig, process_specs
from qlm_cli.up.server import SupervisedServer
from qlm_core.vocabulary.errors import Unavailable
from qlm_process.cluster.state import ClusterState, ClusterStateFile

HEALTH_TIMEOUT_S = 2.0
HEALTH_EVERY_S = 0.1
STANDBY_SERVICES = frozenset({"planner", "estimator"})
"""One of several serves, the others wait for its lease."""


class Cluster:
    """A cluster of one configuration. `run` it in one task, and `stop` it from another or from the same after `run` was cancelled."""

    def __init__(self, config: UpConfig, config_path: str, overrides: Mapping[str, object]) -> None:
        self._config = config
        self._credentials = config.security.credentials()
        self._config_path = config_path
        self._overrides = overrides
        self._state_dir = Path(config.queue.state_dir).resolve()
        self._file = ClusterStateFile(self._state_dir)
        self._server = SupervisedServer(config.queue, config.up, self._write_state) if not config.queue.url else None
        self._queue_url = config.queue.url
        self._children: tuple[Child, ...] = ()
        self._tasks: asyncio.TaskGroup | None = None
        self._was_ready = False
        self._changed = asyncio.Event()

    @property
    def state(self) -> ClusterState:
        server = () if self._server is None else (self._server.state(),)
        return ClusterState(
            pid=os.getpid(),
            queue=self._config.queue.name,
            queue_url=self._queue_url,
            ready=self._was_ready and self._missing() == [],
            processes=(*server, *(child.state() for child in self._children)),
        )

    async def run(self, ready: asyncio.Event) -> None:
        """Starts all and keeps them running until cancelled; sets `ready` when all have served. Raises ConfigError for a wrong setting of
        any process, Unavailable where one does not start in time or keeps failing."""
        self._state_dir.mkdir(parents=True, exist_ok=True)
        if self._server is not None:
            self._queue_url = await self._server.start()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            if self._server is not None:
                tasks.create_task(self._server.watch())
            self._start_new()
            await self._wait_until_ready()
            self._was_ready = True
            self._write_state()
            ready.set()

    async def follow(self, config: UpConfig, changed: Collection[str]) -> None:
        """Takes another configuration, whose file has been written, once all have served: processes that it adds start, others that it
        lacks drain and end, and then those named in `changed` start again, one after the other, each once the one before it serves."""
        self._config = config
        wanted = {entry.name for entries in config.services().values() for entry in entries}
        gone = [child for child in self._children if child.spec.name not in wanted]
        self._start_new()
        await asyncio.gather(*(child.stop(config.up.stop_timeout_s) for child in gone))
        self._children = tuple(child for child in self._children if child not in gone)
        for child in self._children:
            if child.spec.name in changed:
                child.restart()
                await self._wait_until_ready()
        self._write_state()

    def _start_new(self) -> None:
        """Starts the processes of the configuration that are not there."""
        assert self._tasks is not None
        known = {child.spec.name for child in self._children}
        for spec in process_specs(self._config, self._config_path, self._overrides, self._queue_url):
            if spec.name not in known:
                child = Child(spec, self._config.up, self._state_dir / "logs", self._write_state)
                self._children += (child,)
                self._tasks.create_task(child.run())
                self._tasks.create_task(self._watch_health(child))

    async def stop(self) -> bool:
        """Gateways refuse, agents drain while the gateways still stream, then planner and estimator, then the server. True if none had to
        be killed. Safe twice."""
        timeout_s = self._config.up.stop_timeout_s
        await self._stop_services({"gateway", "agent"}, timeout_s)
        await self._stop_services({"planner"}, timeout_s)
        await self._stop_services({"estimator"}, timeout_s)
        if self._server is not None:
            await self._server.stop()
        self._file.remove()
        return not any(child.killed for child in self._children)

    async def _stop_services(self, services: set[str], timeout_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            # Gateways first: they refuse new requests before the agents stop pulling.
            for child in sorted(self._children, key=lambda child: child.spec.service != "gateway"):
                if child.spec.service in services:
                    tasks.create_task(child.stop(timeout_s))

    async def _wait_until_ready(self) -> None:
        timeout_s = self._config.up.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while self._missing():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable(
                f"not serving after {timeout_s:g} s: {', '.join(self._missing())}; "
                + next(f"{child.spec.name}: {child.complaint()}" for child in self._children if child.spec.name in self._missing())
            ) from None

    def _missing(self) -> list[str]:
        """Names of processes that have to serve and do not."""
        led = {child.spec.service for child in self._children if child.serving}
        return [
            child.spec.name
            for child in self._children
            if not child.serving and not (child.spec.service in STANDBY_SERVICES and child.spec.service in led)
        ]

    async def _watch_health(self, child: Child) -> None:
        """Polls each new start of a child until it serves."""
        while True:
            await child.ready.wait()
            if child.phase is Phase.READY and await _serves(child.state().address, self._credentials):
                child.mark_serving()
            await asyncio.sleep(HEALTH_EVERY_S)

    def _write_state(self) -> None:
        """A full disk does not end a cluster: what others read of it is old until there is room."""
        try:
            self._file.write(self.state)
        except OSError as error:
            structlog.get_logger().error("state_not_written", file=str(self._file.path), error=str(error))
        self._changed.set()


async def _serves(address: str, credentials: Credentials) -> bool:
    async with credentials.aio_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False  # not up yet, or gone again: polled anew
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
