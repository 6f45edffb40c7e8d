"""The error tree of QLM, as the SDK raises it (see `qlm_core.vocabulary.errors`)."""

from __future__ import annotations

from qlm_core.vocabulary.errors import (
    CallDeadlineExceeded,
    ConfigError,
    GatewayFull,
    InternalError,
    InvalidRequest,
    LeaseLost,
    NotFound,
    OffsetOutOfRange,
    PermissionDenied,
    PreconditionFailed,
    QlmError,
    QueueFull,
    RequestEnded,
    RequestIdConflict,
    Unauthenticated,
    Unavailable,
)

__all__ = [
    "CallDeadlineExceeded",
    "ConfigError",
    "GatewayFull",
    "InternalError",
    "InvalidRequest",
    "LeaseLost",
    "NotFound",
    "OffsetOutOfRange",
    "PermissionDenied",
    "PreconditionFailed",
    "QlmError",
    "QueueFull",
    "RequestEnded",
    "RequestIdConflict",
    "Unauthenticated",
    "Unavailable",
]
