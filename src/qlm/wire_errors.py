"""QlmError <-> gRPC status: a canonical code, and google.rpc.ErrorInfo (domain "qlm") in the rich status of the trailers.

Used by the SDK and by the servers, so that both ends read the one table of reasons (errors.proto). An error that no QLM service
made (a refused connection, a reset stream) has no ErrorInfo; then the code alone shows its kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, cast

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

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

DOMAIN: Final = "qlm"
STATUS_TRAILER: Final = "grpc-status-details-bin"
MESSAGE_BYTES_MAX: Final = 1024
"""Longer messages are cut: trailers have a size limit of their own, and messages quote what clients sent."""
DETAIL_BYTES_MAX: Final = 256
DETAILS_MAX: Final = 16
BUSY_RETRY_AFTER_S: Final = 0.5
"""For a server that has too many calls in progress."""

_CODES: Final[tuple[tuple[type[QlmError], grpc.StatusCode], ...]] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (RequestIdConflict, grpc.StatusCode.ALREADY_EXISTS),
    (QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (GatewayFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (CallDeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (OffsetOutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (PreconditionFailed, grpc.StatusCode.FAILED_PRECONDITION),
    (RequestEnded, grpc.StatusCode.ABORTED),
    (InternalError, grpc.StatusCode.INTERNAL),
    (LeaseLost, grpc.StatusCode.INTERNAL),
    (ConfigError, grpc.StatusCode.INTERNAL),
)
"""The first class of a code is what an error without a reason becomes."""

_CLASSES: Final[dict[str, type[QlmError]]] = {
    "INVALID_FIELD": InvalidRequest,
    "EMPTY_PROMPT": InvalidRequest,
    "PROMPT_TOO_LONG": InvalidRequest,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "UNKNOWN_MODEL": NotFound,
    "UNKNOWN_REQUEST": NotFound,
    "UNKNOWN_INSTANCE": NotFound,
    "REQUEST_ID_CONFLICT": RequestIdConflict,
    "QUEUE_FULL": QueueFull,
    "WOULD_BE_LATE": QueueFull,
    "RATE_LIMITED": QueueFull,
    "STREAMS_FULL": GatewayFull,
    "QUEUE_UNAVAILABLE": Unavailable,
    "DRAINING": Unavailable,
    "CALL_DEADLINE": CallDeadlineExceeded,
    "OFFSET_OUT_OF_RANGE": OffsetOutOfRange,
    "NOT_LEADER": PreconditionFailed,
    "MODEL_BUSY": PreconditionFailed,
    "ATTEMPTS_EXHAUSTED": RequestEnded,
    "ENGINE_FAILURE": RequestEnded,
    "EXPIRED": RequestEnded,
    "CANCELLED": RequestEnded,
    "KV_CAPACITY_EXCEEDED": RequestEnded,
    "SHED": RequestEnded,
    "RECORD_DAMAGED": RequestEnded,
    "INTERNAL": InternalError,
}
"""The class of each reason of errors.proto."""

_TRANSPORT_BROKEN: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED})


class RpcFailure(Protocol):
    """The common part of `grpc.aio.AioRpcError` and the error of a blocking call."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def error_class(reason: str) -> type[QlmError]:
    """The class that stands for a reason; QlmError for one that this version does not know."""
    return _CLASSES.get(reason, QlmError)


def status_code(error: QlmError) -> grpc.StatusCode:
    """The canonical code of an error (the table at the top of `qlm_core.vocabulary.errors`)."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def to_status(error: QlmError) -> tuple[grpc.StatusCode, bytes]:
    """The code and the serialized google.rpc.Status, which belongs into the trailer `STATUS_TRAILER`."""
    code = status_code(error)
    details = list(error.details.items())[:DETAILS_MAX]
    info = ErrorInfo(reason=error.reason, domain=DOMAIN, metadata={key: cut(value, DETAIL_BYTES_MAX) for key, value in details})
    status = Status(code=int(code.value[0]), message=cut(error.message, MESSAGE_BYTES_MAX))
    status.details.append(_packed(info))
    if error.retry_after_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.append(_packed(retry))
    return code, status.SerializeToString()


def from_rpc_error(failure: grpc.RpcError) -> QlmError:
    """The QlmError behind a failed call. One that no QLM service made has the detail "transport", the name of its code:
    Unavailable where the peer was not reached or broke off, else by its code; InternalError where that says nothing."""
    answer = cast(RpcFailure, failure)
    code = answer.code() or grpc.StatusCode.UNKNOWN
    message = answer.details() or code.name
    info = _error_info(answer.trailing_metadata() or ())
    if info is not None:
        return error_class(info.reason)(message, reason=info.reason, details=dict(info.metadata))
    details = {"transport": code.name}
    # A reset HTTP/2 stream is reported as INTERNAL by the transport; our own INTERNAL always has an ErrorInfo.
    if code in _TRANSPORT_BROKEN or (code is grpc.StatusCode.INTERNAL and "RST_STREAM" in message):
        return Unavailable(message, details=details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallDeadlineExceeded(message, details=details)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # The transport's own limits: the size of a message, and calls in progress at a server.
        if "larger than max" in message:
            return InvalidRequest(message, details={"field": "message", "rule": "within the size limit", **details})
        return Unavailable(message, details={"retry_after_s": f"{BUSY_RETRY_AFTER_S:g}", **details})
    kind = next((kind for kind, known in _CODES if known is code), InternalError)
    return kind(message, details=details)


def cut(text: str, bytes_max: int) -> str:
    """The text, cut to so many bytes of UTF-8; what cannot be encoded is replaced."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= bytes_max:
        return raw.decode("utf-8")
    return raw[: bytes_max - 3].decode("utf-8", "ignore") + "..."


def _packed(message: ErrorInfo | RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def _error_info(trailers: Iterable[tuple[str, str | bytes]]) -> ErrorInfo | None:
    for key, value in trailers:
        if key != STATUS_TRAILER:
            continue
        try:
            status = Status.FromString(value if isinstance(value, bytes) else value.encode("latin-1"))
        except DecodeError:
            return None  # made by something else: the code still shows the kind
        info = ErrorInfo()
        for detail in status.details:
            if detail.Is(ErrorInfo.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
                return info
    return None
