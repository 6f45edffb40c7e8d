"""Watches a server: whether it is up, and its load for other clients.

Runs of this engine are counted here, at once; /metrics lag and count all clients. So the others' load is the excess of /metrics over this
engine's own, the lesser of two successive readings: a run that just ended here may still be counted there. KV is used in whole blocks,
which own runs may not fill.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from qlm_agent.engines.openai.errors import ServerError, ServerRefused, ServerSilent
from qlm_agent.engines.openai.server import OpenAiServer
from qlm_agent.engines.openai.server_load import ServerLoad, read_load

LIMITED = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Runs, and the KV that they hold at most."""

    runs: int = 0
    kv_tokens: int = 0


class LoadWatch:
    """`own`: this engine's present load on that server; `changed`: called after the server became reachable or unreachable, or the others'
    load changed."""

    def __init__(self, server: OpenAiServer, *, poll_s: float, own: Callable[[], Load], changed: Callable[[], None]) -> None:
        self._server = server
        self._poll_s = poll_s
        self._own = own
        self._changed = changed
        self._polling: asyncio.Task[None] | None = None
        self._heard = False
        self._others_before: Load | None = None
        self.up = True  # until the contrary is known
        self.last: ServerLoad | None = None
        self.others = Load()

    def note_output(self) -> None:
        """Notes that it sent output: it may be busy, but is up."""
        self._heard = True

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._poll_s)

    async def poll(self) -> None:
        """Polls the server once; concurrent callers share the poll."""
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_once())
            self._polling.add_done_callback(self._poll_done)
        await asyncio.shield(self._polling)

    async def stop(self) -> None:
        """Ends the poll under way."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])

    def _poll_done(self, _task: asyncio.Task[None]) -> None:
        self._polling = None

    async def _poll_once(self) -> None:
        self._heard = False
        others = self.others
        try:
            await self._server.models()
            await self._read_load()
        except ServerError as error:
            busy = self._heard and isinstance(error, ServerSilent)
            limited = isinstance(error, ServerRefused) and error.status == LIMITED  # it is up, and limits calls
            if not busy and not limited:
                self._is_down(error)
            return
        if not self.up:
            self.up = True
            structlog.get_logger().info("engine_server_up", server=self._server.base_url)
            self._changed()
        elif self.others != others:
            self._changed()

    def _is_down(self, error: Exception) -> None:
        if self.up:
            self.up = False
            structlog.get_logger().error("engine_server_down", server=self._server.base_url, error=str(error))
            self._changed()

    async def _read_load(self) -> None:
        before = self._own()
        try:
            load = read_load(await self._server.metrics())
        except (ServerRefused, ValueError):  # it has no metrics, or no such
            load = None
        self.last = load
        if load is None:
            self.others = Load()
            return
        now = self._own()
        runs = load.running + load.waiting - max(before.runs, now.runs)
        unfilled = max(before.runs, now.runs) * (load.block_tokens - 1)
        kv_tokens = round(load.kv_usage * load.kv_capacity_tokens) - max(before.kv_tokens, now.kv_tokens) - unfilled
        found = Load(runs=runs, kv_tokens=max(0, kv_tokens)) if runs > 0 else Load()
        earlier, self._others_before = self._others_before or found, found
        self.others = Load(runs=min(earlier.runs, found.runs), kv_tokens=min(earlier.kv_tokens, found.kv_tokens))
