"""Answers as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import structlog
from aiohttp import web

from qlm_core.vocabulary.errors import InternalError, QlmError
from qlm_gateway.front.http.errors import NO_NAMES, error_body, error_headers, status_of


def json_response(document: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=json.dumps(document).encode(), status=status, headers=headers, content_type="application/json")


def error_response(error: QlmError, *, chat: bool = False, request_id: str = "", names: Mapping[str, str] = NO_NAMES) -> web.Response:
    headers = {**error_headers(error), **({"x-request-id": request_id} if request_id else {})}
    body = error_body(error, chat=chat, names=names)
    return web.Response(body=body, status=status_of(error), headers=headers, content_type="application/json")


def logged_error(error: Exception) -> InternalError:
    """An error that is not ours: the log has it, without the call's body, and the client only that it happened."""
    structlog.get_logger().error("http_call_failed", exc_info=error)
    return InternalError("the call failed; the gateway's log says why")
