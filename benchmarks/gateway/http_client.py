"""A load generator's connection to one gateway: HTTP/1.1 with requests as bytes, cheap for the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

CALL_TIMEOUT_S = 60.0
READ_BYTES = 1 << 16
END_OF_EVENT = b"\n\n"


class HttpConnection:
    """One connection that is kept alive, for one call at a time; an asynchronous context manager. `address`: "host:port"."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> HttpConnection:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def call(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of an answer that has a length."""
        async with asyncio.timeout(CALL_TIMEOUT_S):
            status, head = await self._head(request)
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            return status, await self._reader.readexactly(int(length.partition(b":")[2]))

    async def events(self, request: bytes) -> AsyncIterator[int]:
        """Numbers of events that arrive together, as long as the connection lasts. The first, 0, is the head; raises ConnectionError
        where its status is not 200."""
        async with asyncio.timeout(CALL_TIMEOUT_S):
            status, _ = await self._head(request)
        if status != 200:
            raise ConnectionError(f"the answer of a stream is {status}")
        yield 0
        last = b""
        while data := await self._reader.read(READ_BYTES):
            seen = last + data
            last = data[-1:]
            yield seen.count(END_OF_EVENT)

    async def _head(self, request: bytes) -> tuple[int, bytes]:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        return int(head[9:12]), head
