"""Errors as the OpenAI API has them: a status, a body, and headers that say whether and when to try again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from qlm.api.v1.request_pb2 import Result, SamplingParams
from qlm_core.vocabulary.errors import (
    CallDeadlineExceeded,
    GatewayFull,
    InvalidRequest,
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
from qlm_core.vocabulary.overload import WOULD_BE_LATE

_STATUS: tuple[tuple[type[QlmError], int], ...] = (
    (InvalidRequest, 400),
    (OffsetOutOfRange, 400),
    (Unauthenticated, 401),
    (PermissionDenied, 403),
    (NotFound, 404),
    (RequestIdConflict, 409),
    (PreconditionFailed, 409),
    (QueueFull, 429),
    (GatewayFull, 503),
    (Unavailable, 503),
    (CallDeadlineExceeded, 504),
)
_STATUS_OF_END = {"CANCELLED": 409, "EXPIRED": 504, "SHED": 503, "KV_CAPACITY_EXCEEDED": 400, "ENGINE_FAILURE": 400}
"""By reason; of any other 500."""
_CODES = {"UNAUTHENTICATED": "invalid_api_key", "UNKNOWN_MODEL": "model_not_found", "PROMPT_TOO_LONG": "context_length_exceeded"}
"""By reason, where the API has its own; of any other the reason in small letters."""
STILL_WAITING = "STILL_WAITING"
"""Reason of a call that ends before its answer is there, because its client would not wait for it."""
CLIENT_RETRY_S_MAX = 120.0
"""OpenAI's client does not wait longer than this to send a call again."""
NO_CAPACITY = ("memory", "disk")
"""Bounds of the queue's server, for which nobody contends: 503."""
SAMPLING_FIELD = re.compile(rf"\b({'|'.join(name for name in SamplingParams.DESCRIPTOR.fields_by_name if name != 'stop')})\b")
"""Not `stop`, which is also a word of messages."""
NO_NAMES: Mapping[str, str] = {}
_PARAMS = {
    "request_id": "Idempotency-Key",
    "tokens.ids": "prompt",
    "expire_after_s": "x-llm-d-inference-ttl",
    "slo.seconds": "x-qlm-slo-seconds",
    "slo.priority": "x-qlm-priority",
    "chat.messages": "messages",
    "chat.messages.role": "messages",
    "sampling.json_schema": "response_format",
}


class HttpError(QlmError):
    """A call that breaks a rule of HTTP or of the front, which gRPC has not."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message, reason=code.upper())
        self.status = status


def ended_error(result: Result) -> RequestEnded:
    """The error of a request that did not complete."""
    return RequestEnded(result.error.message or "the request did not complete", reason=result.error.reason or "INTERNAL")


def status_of(error: QlmError) -> int:
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, RequestEnded):
        return _STATUS_OF_END.get(error.reason, 500)
    if isinstance(error, QueueFull) and error.details.get("bound") in NO_CAPACITY:
        return 503
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(error: QlmError, *, chat: bool = False, names: Mapping[str, str] = NO_NAMES) -> bytes:
    """`chat`: the prompt is the parameter `messages`. `names`: other names of parameters."""
    return json.dumps({"error": error_document(error, chat=chat, names=names)}).encode()


def error_document(error: QlmError, *, chat: bool = False, names: Mapping[str, str] = NO_NAMES) -> dict[str, Any]:
    """As `error_body`, without its frame."""
    status = status_of(error)
    field = error.details.get("field", "")
    if error.reason == "ENGINE_FAILURE" and (named := SAMPLING_FIELD.search(error.message)):  # the engine refused it, in its own words
        field = f"sampling.{named.group()}"
    param = _PARAMS.get(field, field.removeprefix("sampling."))
    param = names.get(param, param)
    message = error.message.replace(field, param, 1) if field else error.message
    if (error.retry_after_s or 0.0) > CLIENT_RETRY_S_MAX:
        message += ". Send it with x-qlm-mode: enqueue and a longer SLO" if error.reason == WOULD_BE_LATE else ". Send it again then"
    if error.reason in ("EMPTY_PROMPT", "PROMPT_TOO_LONG"):
        param = "prompt"
    elif error.reason == "UNKNOWN_MODEL":
        param = "model"
    if chat and param == "prompt":
        param = names.get("messages", "messages")
    return {
        "message": message,
        "type": "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error",
        "param": param or None,
        "code": _CODES.get(error.reason) or error.reason.lower(),
    }


def error_headers(error: QlmError) -> dict[str, str]:
    """Retry hints, and for what ends the same way again that there is no use in it."""
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    retry_after_s = error.retry_after_s
    if retry_after_s is not None:
        return {"Retry-After": str(math.ceil(retry_after_s)), "retry-after-ms": str(math.ceil(retry_after_s * 1000))}
    final = isinstance(error, (RequestEnded, RequestIdConflict, PreconditionFailed)) or error.reason == STILL_WAITING
    return {"x-should-retry": "false"} if final else {}
