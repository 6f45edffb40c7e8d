"""What one reader is given, between the hub that delivers and the call that takes. Bounded by the machine, not here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qlm.api.v1.request_pb2 import Result
from qlm_core.errors import QlmError
from qlm_gateway.stream_events import ReaderId

Part = tuple[int, Sequence[int], Sequence[str]]
"""Consecutive output: offset of its first token, token ids, text pieces."""


class ReaderStream:
    """`model`, `before`: known once the request is: the model's name, and the tokens just before the first part."""

    __slots__ = ("_waiter", "before", "error", "failure", "model", "parts", "reader", "result")

    def __init__(self, reader: ReaderId) -> None:
        self.reader = reader
        self.parts: list[Part] = []
        self.result: Result | None = None
        self.error: QlmError | None = None
        self.failure: QlmError | None = None
        self.model = ""
        self.before: Sequence[int] = ()
        self._waiter: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """Something was delivered."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until there are parts, the result or an error. One waiter at a time."""
        while not (self.parts or self.result is not None or self.error is not None):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self) -> tuple[int, list[int], list[str]]:
        """All parts as one, and none is left. They follow each other; there is at least one."""
        parts, self.parts = self.parts, []
        offset, token_ids, pieces = parts[0]
        if len(parts) == 1:
            return offset, list(token_ids), list(pieces)
        return offset, [token for part in parts for token in part[1]], [piece for part in parts for piece in part[2]]
