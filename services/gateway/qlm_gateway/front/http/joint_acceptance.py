"""All choices of a call are accepted, or the call is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from qlm.api.v1.gateway_pb2 import Accepted
from qlm_core.vocabulary.errors import QlmError


class JointAcceptance:
    """The answers of admission to `count` requests. `accepted`: those that were accepted so far; `refusal`: the first of the others."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._settled = asyncio.Event()
        self.accepted: list[Accepted] = []
        self.refusal: QlmError | None = None

    async def accept(self, accepted: Accepted) -> None:
        """Returns when all requests were accepted. Raises the refusal of another one."""
        self.accepted.append(accepted)
        await self._answered()
        if self.refusal is not None:
            raise self.refusal

    async def run(self, call: Awaitable[None]) -> None:
        """One request's call. It fails when all requests are answered: none is broken off on its way into the queue."""
        try:
            await call
        except QlmError as error:
            if not self._settled.is_set():
                self.refusal = self.refusal or error
                await self._answered()
            raise

    async def _answered(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._settled.set()
        await self._settled.wait()
