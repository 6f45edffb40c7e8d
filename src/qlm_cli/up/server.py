"""The embedded server under supervision: started again on its port, with its data, when it ends."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import structlog

from qlm_cli.up.config import UpSection
from qlm_core.vocabulary.errors import Unavailable
from qlm_process.cluster.state import ProcessState
from qlm_process.die_with_parent import launcher
from qlm_process.settings import QueueSettings
from qlm_queue.embedded.server import EmbeddedServer

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
        """Its URL for this machine, which it keeps. Raises ConfigError or Unavailable."""
        await self._server.start()
        self._on_change()
        return self._server.local_url

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
        """Starts it again whenever it ends, at once the first time and after a growing pause where it ends or fails to start again and
        again, until `stop`. Raises Unavailable if it keeps ending."""
        settings = self._settings
        ended_s: deque[float] = deque(maxlen=settings.restarts_max + 1)
        while not self._stopping:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._server.running or self._stopping:
                continue
            now_s = time.monotonic()
            ended_s.append(now_s)
            recent = [at_s for at_s in ended_s if now_s - at_s < settings.restart_window_s]
            if len(recent) > settings.restarts_max:
                raise Unavailable(f"the queue's server ended {len(recent)} times; see {self._state_dir}/server.log")
            structlog.get_logger().warning("server_ended")
            self._on_change()
            if len(recent) > 1:
                await asyncio.sleep(min(settings.restart_backoff_s * 2 ** (len(recent) - 2), settings.restart_backoff_max_s))
                if self._stopping:
                    return
            try:
                await self._server.start()
            except Unavailable as error:
                # Killed while it started, its port taken for a moment, or a long log to read: it is checked again, not given up.
                structlog.get_logger().warning("server_not_up_yet", error=error.message)
                if not self._server.running:
                    continue
            self._restarts += 1
            self._on_change()

    async def stop(self) -> None:
        """Asks it to end, and waits. Safe twice."""
        self._stopping = True
        await self._server.stop()
