"""The lines of an input file: JSON in UTF-8, with or without a byte order mark, ended by LF or CRLF; empty lines count for nothing."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from qlm.api.v1.request_pb2 import Request
from qlm_core.vocabulary.errors import QlmError
from qlm_gateway.batches.records import LineError
from qlm_gateway.front.http.bodies import Body, ChatBody, CompletionBody, read_body
from qlm_gateway.front.http.calls import read_call
from qlm_gateway.front.http.settings import HttpSettings

ENDPOINTS: dict[str, type[Body]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
ERRORS_MAX = 100
"""Most errors of a file that are reported; then it is read no further."""
CUSTOM_ID_MAX = 512
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`number`: of the line, from 1. `request`: what it asks for, without an id."""

    number: int
    custom_id: str
    request: Request


class BadLine(Exception):
    """Says why a line is no request."""

    def __init__(self, error: LineError) -> None:
        super().__init__(error.message)
        self.error = error


def read_lines(file: BinaryIO, line_bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Numbers and contents of the lines that are not empty; of a longer line its first `line_bytes_max` + 1 bytes. Closes the file."""
    with file:
        number = 0
        while raw := file.readline(line_bytes_max + 1):
            number += 1
            whole = raw
            while not whole.endswith(b"\n") and (whole := file.readline(line_bytes_max + 1)):
                pass
            line = (raw.removeprefix(BYTE_ORDER_MARK) if number == 1 else raw).strip()
            if line:
                yield number, line


def parse_line(number: int, line: bytes, endpoint: str, settings: HttpSettings) -> Line:
    """Raises BadLine."""

    def bad(code: str, message: str, param: str | None = None) -> BadLine:
        return BadLine(LineError(code=code, message=message, param=param, line=number))

    if len(line) > settings.body_bytes_max:
        raise bad("invalid_line", f"a line has at most {settings.body_bytes_max} bytes")
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        raise bad("invalid_json_line", "the line is not JSON in UTF-8") from None
    if not isinstance(document, dict):
        raise bad("invalid_json_line", "the line is not an object")
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= CUSTOM_ID_MAX:
        raise bad("missing_required_parameter", f"custom_id is a text of 1 to {CUSTOM_ID_MAX} characters", "custom_id")
    if document.get("method") != "POST":
        raise bad("invalid_method", "method is POST", "method")
    if document.get("url") != endpoint:
        raise bad("invalid_url", f"url is the batch's endpoint, {endpoint}", "url")
    if not isinstance(document.get("body"), dict):
        raise bad("invalid_request", "body is an object", "body")
    try:
        body = read_body(ENDPOINTS[endpoint], json.dumps(document["body"]).encode(), refuse_unknown=settings.unknown_fields == "refuse")
        call = read_call(body, {}, settings, "line")
    except QlmError as error:
        raise bad("invalid_request", error.message, f"body.{error.details['field']}" if error.details.get("field") else "body") from None
    if len(call.requests) != 1 or call.stream:
        raise bad("invalid_request", "a line of a batch has one answer, which is not streamed", "body.stream" if call.stream else "body.n")
    if call.tools is not None:
        raise bad("invalid_request", "tools: absent in batches", "body.tools")
    (request,) = call.requests
    request.request_id = ""
    return Line(number=number, custom_id=custom_id, request=request)


def check_file(
    file: BinaryIO, endpoint: str, settings: HttpSettings, lines_max: int, models: Collection[str]
) -> tuple[int, list[LineError]]:
    """How many requests a file has, and what is wrong with it, at most ERRORS_MAX errors. `models`: those that may be requested."""
    total, errors, seen = 0, list[LineError](), dict[str, int]()
    for number, raw in read_lines(file, settings.body_bytes_max):
        total += 1
        if total > lines_max:
            errors.append(LineError(code="too_many_tasks", message=f"a batch has at most {lines_max} requests"))
            break
        try:
            line = parse_line(number, raw, endpoint, settings)
            if line.custom_id in seen:
                message = f"this custom_id is that of line {seen[line.custom_id]}"
                raise BadLine(LineError(code="duplicate_custom_id", message=message, param="custom_id", line=number))
            seen[line.custom_id] = number
            if line.request.model not in models:
                message = f"model {line.request.model[:128]!r} is not served here, or not with this API key"
                raise BadLine(LineError(code="model_not_found", message=message, param="body.model", line=number))
        except BadLine as error:
            errors.append(error.error)
            if len(errors) >= ERRORS_MAX:
                break
    if not total:
        errors.append(LineError(code="empty_file", message="the file has no requests"))
    return total, errors
