"""QlmErrors over gRPC and back."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from qlm.api.v1.errors_pb2 import ErrorReason
from qlm.wire_errors import DETAIL_BYTES_MAX, MESSAGE_BYTES_MAX, STATUS_TRAILER, cut, error_class, from_rpc_error, status_code, to_status
from qlm_core.vocabulary.errors import (
    CallDeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    QlmError,
    QueueFull,
    RequestEnded,
    Unavailable,
)

REASONS = [name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys() if not name.endswith("UNSPECIFIED")]  # noqa: SIM118


def failure(code: grpc.StatusCode, message: str, trailers: tuple[tuple[str, bytes], ...] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=message, debug_error_string=None)


def over_the_wire(error: QlmError) -> QlmError:
    code, status = to_status(error)
    return from_rpc_error(failure(code, cut(error.message, MESSAGE_BYTES_MAX), ((STATUS_TRAILER, status),)))


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_of_the_table_has_a_class_and_comes_back_as_it_was(reason: str) -> None:
    kind = error_class(reason)
    assert kind is not QlmError
    back = over_the_wire(kind("why", reason=reason, details={"a": "1", "retry_after_s": "2.5"}))
    assert (type(back), back.reason, back.message, back.details) == (kind, reason, "why", {"a": "1", "retry_after_s": "2.5"})
    assert back.retry_after_s == 2.5


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (NotFound("x"), grpc.StatusCode.NOT_FOUND),
        (QueueFull("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("x"), grpc.StatusCode.UNAVAILABLE),
        (RequestEnded("x"), grpc.StatusCode.ABORTED),
        (InternalError("x"), grpc.StatusCode.INTERNAL),
        (QlmError("x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_codes_are_canonical(error: QlmError, code: grpc.StatusCode) -> None:
    assert status_code(error) is code


def test_a_clients_text_cannot_overflow_the_trailers() -> None:
    error = NotFound("é" * 10_000, details={"model": "x" * 100_000, **{f"d{index}": "y" * 1000 for index in range(100)}})
    _, status = to_status(error)
    assert len(status) < 8_192
    back = over_the_wire(error)
    assert len(back.message.encode()) <= MESSAGE_BYTES_MAX
    assert len(back.details["model"]) == DETAIL_BYTES_MAX


def test_cut_keeps_whole_characters_and_replaces_what_cannot_be_sent() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("é" * 10, 10) == "ééé..."
    assert cut("a\udc80b", 10) == "a?b"


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", Unavailable),
        (grpc.StatusCode.CANCELLED, "", Unavailable),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", Unavailable),
        (grpc.StatusCode.INTERNAL, "anything else", InternalError),
        (grpc.StatusCode.UNKNOWN, "", InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, "", InternalError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", CallDeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 8)", InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", Unavailable),
        (grpc.StatusCode.NOT_FOUND, "", NotFound),
    ],
)
def test_errors_of_the_transport_have_no_reason_of_ours(code: grpc.StatusCode, message: str, kind: type[QlmError]) -> None:
    error = from_rpc_error(failure(code, message))
    assert type(error) is kind
    assert error.details["transport"] == code.name


def test_details_that_are_no_status_are_passed_over() -> None:
    error = from_rpc_error(failure(grpc.StatusCode.NOT_FOUND, "gone", ((STATUS_TRAILER, b"\xff\xff\xff"),)))
    assert type(error) is NotFound
    assert error.message == "gone"


def test_a_reason_of_a_later_version_is_kept() -> None:
    assert over_the_wire(QlmError("new", reason="SOMETHING_NEW")).reason == "SOMETHING_NEW"
