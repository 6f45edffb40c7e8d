"""Profiles that somebody brings: from the service that is asked to the leader's loop that takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from qlm_core.errors import PreconditionFailed, QlmError, Unavailable
from qlm_core.profile import ProfileSnapshot

WAITING_MAX = 16
"""Imports that wait for the leader's loop; more are refused."""


@dataclass(slots=True)
class Import:
    """One import; `published`: the version that holds its rows."""

    snapshot: ProfileSnapshot
    published: asyncio.Future[int]

    def settle(self, version: int) -> None:
        if not self.published.done():
            self.published.set_result(version)

    def fail(self, error: QlmError) -> None:
        if not self.published.done():
            self.published.set_exception(error)


@dataclass(slots=True)
class ImportDesk:
    """`leading`: whether somebody takes what is brought."""

    leading: bool = False
    _waiting: deque[Import] = field(default_factory=deque)

    async def bring(self, snapshot: ProfileSnapshot) -> int:
        """Waits until the rows are published; the version that holds them. Raises PreconditionFailed (NOT_LEADER) where this process does
        not lead, or no longer, and Unavailable where the queue is, or too many imports wait."""
        if not self.leading:
            raise PreconditionFailed("this estimator is a standby")
        if len(self._waiting) >= WAITING_MAX:
            raise Unavailable(f"{WAITING_MAX} imports wait already", details={"retry_after_s": "1"})
        brought = Import(snapshot, asyncio.get_running_loop().create_future())
        self._waiting.append(brought)
        try:
            return await brought.published
        finally:
            if brought in self._waiting:  # whoever asked has gone
                self._waiting.remove(brought)

    def next(self) -> Import | None:
        """The next to take."""
        return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        """Nobody takes any more."""
        self.leading = False
        while (brought := self.next()) is not None:
            brought.fail(PreconditionFailed("this estimator leads no more"))
