"""The error tree of QLM.

    QlmError
    ├── InvalidRequest            INVALID_ARGUMENT   INVALID_FIELD | EMPTY_PROMPT | PROMPT_TOO_LONG
    ├── Unauthenticated           UNAUTHENTICATED    UNAUTHENTICATED
    ├── PermissionDenied          PERMISSION_DENIED  PERMISSION_DENIED
    ├── NotFound                  NOT_FOUND          UNKNOWN_MODEL | UNKNOWN_REQUEST | UNKNOWN_INSTANCE
    ├── RequestIdConflict         ALREADY_EXISTS     REQUEST_ID_CONFLICT
    ├── QueueFull                 RESOURCE_EXHAUSTED QUEUE_FULL | WOULD_BE_LATE | RATE_LIMITED
    ├── GatewayFull               RESOURCE_EXHAUSTED STREAMS_FULL
    ├── Unavailable               UNAVAILABLE        QUEUE_UNAVAILABLE | DRAINING
    ├── CallDeadlineExceeded      DEADLINE_EXCEEDED  CALL_DEADLINE
    ├── OffsetOutOfRange          OUT_OF_RANGE       OFFSET_OUT_OF_RANGE
    ├── PreconditionFailed        FAILED_PRECONDITION NOT_LEADER | MODEL_BUSY
    ├── RequestEnded              (of a Result)      ATTEMPTS_EXHAUSTED | ENGINE_FAILURE | EXPIRED | CANCELLED | KV_CAPACITY_EXCEEDED
    │                                                | SHED | RECORD_DAMAGED
    ├── LeaseLost                 a lease expired or belongs to another: the holder starts again
    ├── ConfigError               a wrong setting, found at start
    └── InternalError             INTERNAL           INTERNAL

Every error has a reason of `errors.proto` (without its prefix) and string details, the metadata of its ErrorInfo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from qlm_core.vocabulary.masking import masked


class QlmError(Exception):
    """Base of all errors that QLM raises on purpose. Messages and details hold no secrets of URLs."""

    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None, details: Mapping[str, str] | None = None) -> None:
        message = masked(message)
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.details: dict[str, str] = {name: masked(value) for name, value in (details or {}).items()}

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which the same call may succeed, or None where it will not."""
        text = self.details.get("retry_after_s")
        return None if text is None else float(text)


class InvalidRequest(QlmError):
    default_reason = "INVALID_FIELD"


def invalid_field(field: str, rule: str, value: float | None = None) -> InvalidRequest:
    """A field breaks its rule (reason INVALID_FIELD). `value`: of a number; texts may be prompts or secrets, and are not quoted."""
    if value is None:
        return InvalidRequest(f"{field}: must be {rule}", details={"field": field, "rule": rule})
    return InvalidRequest(f"{field}: must be {rule}, not {value}", details={"field": field, "rule": rule, "value": f"{value}"})


class Unauthenticated(QlmError):
    """A call without an API key, or with one that is not valid."""

    default_reason = "UNAUTHENTICATED"


class PermissionDenied(QlmError):
    """The API key may not do this."""

    default_reason = "PERMISSION_DENIED"


class NotFound(QlmError):
    default_reason = "UNKNOWN_REQUEST"


class RequestIdConflict(QlmError):
    default_reason = "REQUEST_ID_CONFLICT"


class QueueFull(QlmError):
    default_reason = "QUEUE_FULL"


class GatewayFull(QlmError):
    """A gateway has too many open streams: another may have room."""

    default_reason = "STREAMS_FULL"


class Unavailable(QlmError):
    default_reason = "QUEUE_UNAVAILABLE"


class CallDeadlineExceeded(QlmError):
    default_reason = "CALL_DEADLINE"


class OffsetOutOfRange(QlmError):
    default_reason = "OFFSET_OUT_OF_RANGE"


class PreconditionFailed(QlmError):
    default_reason = "NOT_LEADER"


class RequestEnded(QlmError):
    """A request ended FAILED, CANCELLED or EXPIRED; the reason is that of its Result."""

    default_reason = "ENGINE_FAILURE"


class LeaseLost(QlmError):
    default_reason = "INTERNAL"


class ConfigError(QlmError):
    default_reason = "INTERNAL"


class InternalError(QlmError):
    default_reason = "INTERNAL"
