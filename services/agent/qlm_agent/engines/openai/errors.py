"""What can go wrong with a server, as the engine tells it apart."""

from __future__ import annotations

from qlm_agent.engines.port import EngineFailure, FailureKind
from qlm_core.masking import masked

REFUSING = frozenset({400, 413, 422})
"""Statuses that say that the request itself is wrong."""

BUSY = frozenset({429, 503})
"""Statuses that say that it may succeed soon."""


class ServerError(Exception):
    """A call that did not succeed; the message names the server, without secrets."""

    kind = FailureKind.BROKEN
    passing = False  # the same call may succeed in a moment

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))

    def failure(self) -> EngineFailure:
        return EngineFailure(kind=self.kind, message=str(self))


class ServerAway(ServerError):
    """It serves nobody now."""

    kind = FailureKind.AWAY


class ServerUnreachable(ServerError):
    """No connection, or it broke."""

    passing = True


class ServerAbsent(ServerUnreachable):
    """Nobody listens there: the connection was refused."""

    kind = FailureKind.AWAY


class ServerSilent(ServerError):
    """It did not answer in time."""


class ServerFull(ServerSilent):
    """It took no connection in time: it hangs, or is too busy for one more; nothing was asked of it."""

    kind = FailureKind.AWAY
    passing = True


class ServerRefused(ServerError):
    """It answered, with an error."""

    def __init__(self, message: str, status: int, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.passing = status in BUSY
        if status in REFUSING:
            self.kind = FailureKind.REFUSED
        elif self.passing:
            self.kind = FailureKind.AWAY


class ServerNonsense(ServerError):
    """It answered with what no OpenAI-compatible server answers."""


class NotServable(ServerError):
    """The request asks for what this server cannot do; it was not sent."""

    kind = FailureKind.REFUSED
