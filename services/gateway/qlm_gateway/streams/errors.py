"""The errors that end readers, or keep them out."""

from __future__ import annotations

from typing import assert_never

from qlm_core.vocabulary.errors import GatewayFull, QlmError, RequestEnded, Unavailable
from qlm_gateway.streams.events import Refusal

DRAINING_RETRY_AFTER_S = 0.1
"""A client may go to another gateway at once."""
FULL_RETRY_AFTER_S = 0.5
QUEUE_RETRY_AFTER_S = 1.0


def draining() -> Unavailable:
    """This process is stopping."""
    return Unavailable(
        "this gateway is stopping; send the same request id to another",
        reason="DRAINING",
        details={"retry_after_s": f"{DRAINING_RETRY_AFTER_S:g}"},
    )


def streams_full(limit: int) -> GatewayFull:
    """As many calls follow requests here as may."""
    return GatewayFull(
        f"this gateway follows {limit} requests and takes no more; send the same request id to another, or later",
        details={"limit": str(limit), "retry_after_s": f"{FULL_RETRY_AFTER_S:g}"},
    )


def refusal_error(refusal: Refusal, failure: QlmError | None) -> QlmError:
    """Returns the error that ends a reader. `failure`: the queue's last answer about its request."""
    match refusal:
        case Refusal.DRAINING:
            return draining()
        case Refusal.QUEUE_UNAVAILABLE:
            message = failure.message if failure is not None else "the queue's server is away"
            return Unavailable(message, details={"retry_after_s": f"{QUEUE_RETRY_AFTER_S:g}"})
        case Refusal.ERASED:
            return RequestEnded("the request was cancelled and erased", reason="CANCELLED")
        case Refusal.UNKNOWN_REQUEST | Refusal.OFFSET_OUT_OF_RANGE | Refusal.UNREADABLE:
            assert failure is not None, "the failed answer was kept"
            return failure
        case _:
            assert_never(refusal)
