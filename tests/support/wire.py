"""A wire between a process and the server that can be cut: what is sent meanwhile is not lost, as TCP would have it, but arrives when it
heals. Or answers on the connections that are there are swallowed, as by a way that broke without a word."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

READ_BYTES = 1 << 16


class Wire:
    """A TCP proxy on a port of its own. `held`: bytes that wait for it to heal, in both directions. `swallowed`: those that are lost."""

    def __init__(self, url: str) -> None:
        """`url`: of the server."""
        target = urlsplit(url)
        assert target.hostname is not None
        assert target.port is not None
        self._target = (target.hostname, target.port)
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self._opened = 0
        self._deaf = 0
        self.held = 0
        self.swallowed = 0
        self.url = ""

    async def start(self) -> Wire:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        pumps = list(self._pumps)
        for pump in pumps:
            pump.cancel()
        if pumps:
            await asyncio.wait(pumps)

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    def swallow_answers(self) -> None:
        """From now on, connections that are open deliver requests and swallow answers. Later ones are whole."""
        self._deaf = self._opened

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()  # a new connection waits too
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        self._opened += 1
        number = self._opened
        for source, sink, answers in ((reader, there_writer, False), (there_reader, writer, True)):
            pump = asyncio.create_task(self._pump(source, sink, number if answers else None))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers_of: int | None) -> None:
        """`answers_of`: the number of the connection that this is the way back of."""
        try:
            while data := await source.read(READ_BYTES):
                self.held += len(data)
                await self._whole.wait()
                self.held -= len(data)
                if answers_of is not None and answers_of <= self._deaf:
                    self.swallowed += len(data)
                    continue
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            return  # the other side is closed: so is this one
        finally:
            sink.close()
