"""The embedded server under supervision: started again on its port, with its data, when it ends."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import structlog

from qlm.cli.up.config import UpSection, launcher
from qlm_core.errors import Unavailable
from qlm_process.cluster_state import ProcessState
from qlm_process.settings import QueueSettings
from qlm_queue.embedded import EmbeddedServer

WATCH_EVERY_S = 0.1


class SupervisedServer:
    """Runs the queue's server. `on_change` is called whenever `state()` may have changed."""

    def __init__(self, queue: QueueSettings, settings: UpSection, on_change: Callable[[], None]) -> None:
        self._server = EmbeddedServer(queue.state_dir, queue.durability, launcher=launcher())
        self._state_dir = queue.state_dir
        self._settings = settings
        self._on_change = on_change
        self._restarts = 0
        self._stopping = False

    async def start(self) -> str:
        """Its URL, which it keeps. Raises ConfigError or Unavailable."""
        url = await self._server.start()
        self._on_change()
        return url

    def state(self) -> ProcessState:
        running = self._server.running
        return ProcessState(
            name="server",
            service="server",
            pid=self._server.pid or 0 if running else 0,
            address=self._server.url.partition("://")[2].partition("/")[0],
            restarts=self._restarts,
            serving=running,
            log=f"{self._state_dir}/server.log",
        )

    async def watch(self) -> None:
        """Starts it again whenever it ends, until `stop`. Raises Unavailable if it keeps ending."""
        ended_s: deque[float] = deque(maxlen=self._settings.restarts_max + 1)
        while not self._stopping:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._server.running or self._stopping:
                continue
            now_s = time.monotonic()
            ended_s.append(now_s)
            recent = [at_s for at_s in ended_s if now_s - at_s < self._settings.restart_window_s]
            if len(recent) > self._settings.restarts_max:
                raise Unavailable(f"the queue's server ended {len(recent)} times; see {self._state_dir}/server.log")
            structlog.get_logger().warning("server_ended")
            self._on_change()
            await self._server.start()
            self._restarts += 1
            self._on_change()

    async def stop(self) -> None:
        """Asks it to end, and waits. Safe twice."""
        self._stopping = True
        await self._server.stop()
