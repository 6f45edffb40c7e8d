"""Errors of a server, as the engine distinguishes them."""

from __future__ import annotations

from qlm_agent.engines.port import EngineFailure, FailureKind
from qlm_core.vocabulary.masking import masked

REFUSING = frozenset({400, 413, 422})
"""Statuses of a request that is itself wrong."""

BUSY = frozenset({429, 503})
"""Statuses after which a call may succeed soon."""


class ServerError(Exception):
    """A call that did not succeed; the message names the server, without secrets."""

    kind = FailureKind.BROKEN
    passing = False  # the same call may succeed in a moment

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))

    def failure(self) -> EngineFailure:
        return EngineFailure(kind=self.kind, message=str(self))


class ServerAway(ServerError):
    """It serves nobody at present."""

    kind = FailureKind.AWAY


class ServerUnreachable(ServerError):
    """No connection, or it broke."""

    passing = True


class ServerAbsent(ServerUnreachable):
    """No process listens there: the connection was refused."""

    kind = FailureKind.AWAY


class ServerSilent(ServerError):
    """It did not answer in time."""


class ServerFull(ServerSilent):
    """It accepted no connection in time: it hangs, or is too busy; no request was sent."""

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


class ServerProtocolError(ServerError):
    """Its answer is not one of an OpenAI-compatible server."""


class NotServable(ServerError):
    """This server cannot serve the request; it was not sent."""

    kind = FailureKind.REFUSED
