"""Events and effects of the `GatewayMachine`. Token bytes stay in the shell:
offsets and counts are tokens (or text pieces, for engines that give only text)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from qlm_core.vocabulary.request import RequestKey

ReaderId = int
"""A call that follows a request: a stream, or one that waits for the end."""


class ReaderKind(StrEnum):
    """The form in which a reader wants a request."""

    TOKENS = "tokens"
    END = "end"


class AttachFailure(StrEnum):
    """Why the queue could not say where a request is."""

    UNKNOWN_REQUEST = "unknown_request"
    OFFSET_OUT_OF_RANGE = "offset_out_of_range"
    UNREADABLE = "unreadable"
    UNAVAILABLE = "unavailable"


class Refusal(StrEnum):
    """Why a reader is ended before its request is."""

    UNKNOWN_REQUEST = "unknown_request"
    ERASED = "erased"
    OFFSET_OUT_OF_RANGE = "offset_out_of_range"
    UNREADABLE = "unreadable"
    QUEUE_UNAVAILABLE = "queue_unavailable"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameFacts:
    """A frame without its tokens. `total`: on the last frame of a request that COMPLETED, all its output; -1 elsewhere. `last`: it
    brings the end of the request."""

    queue_id: str
    offset: int
    count: int
    last: bool = False
    total: int = -1


# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptSent:
    """A request of which this reader wants the tokens is on its way into the queue."""

    reader: ReaderId


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """It is in the queue, new, and bound to this gateway. An earlier one (a duplicate) is `Opened` instead."""

    reader: ReaderId
    key: RequestKey
    queue_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A reader wants an accepted request, its tokens from `offset` on."""

    reader: ReaderId
    kind: ReaderKind
    key: RequestKey
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Answer to `Attach` and `Find`. `gateway`: the one that frames go to. `produced`: so many tokens there were (after `Attach`)."""

    reader: ReaderId
    queue_id: str
    ended: bool
    gateway: str
    produced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateFailed:
    reader: ReaderId
    failure: AttachFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesRead:
    """Frames of one entry of this gateway's stream, in order."""

    frames: Sequence[FrameFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A reader has taken all before `offset`. Said again where it waits for more after `Forget`."""

    reader: ReaderId
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A reader is gone. Its request goes on."""

    reader: ReaderId


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted:
    """The process stops in `grace_s`: nothing new; readers that are still here then are refused."""

    grace_s: float


Event = AcceptSent | Accepted | Opened | Located | LocateFailed | FramesRead | Taken | Closed | Tick | DrainStarted


# Effects --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Ask the queue for the output from `offset` on; `bind`: and send frames here from now on."""

    reader: ReaderId
    key: RequestKey
    bind: bool
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """Ask the queue whether a request has ended."""

    reader: ReaderId
    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverFrame:
    """Give the tokens of the event's frame number `frame`, without its first `skip`, which start at `offset`."""

    reader: ReaderId
    frame: int
    skip: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverOutput:
    """Give `count` tokens of the output that the answer brought, after its first `skip`; they start at `offset`."""

    reader: ReaderId
    skip: int
    offset: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Take back what the reader was given and has not taken, its end included: it is read again when the reader wants it."""

    reader: ReaderId


@dataclass(frozen=True, slots=True, kw_only=True)
class EndByFrame:
    """End the reader with the Result of the event's frame number `frame`."""

    reader: ReaderId
    frame: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndByRecord:
    """End the reader with the Result that the answer brought: with its output after `Find`, without after `Attach`."""

    reader: ReaderId


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """End the reader with an error."""

    reader: ReaderId
    refusal: Refusal


Effect = Attach | Find | DeliverFrame | DeliverOutput | Forget | EndByFrame | EndByRecord | Refuse
