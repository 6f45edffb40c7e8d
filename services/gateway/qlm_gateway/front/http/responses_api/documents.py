"""Responses and the events of their streams, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from typing import Any

from qlm_core.vocabulary.errors import QlmError
from qlm_gateway.front.http.answers import ChunkForm
from qlm_gateway.front.http.calls import Call
from qlm_gateway.front.http.errors import error_document
from qlm_gateway.front.http.responses_api.body import PARAMETERS, ResponsesBody

ECHOED = ("background", "instructions", "max_output_tokens", "metadata", "temperature", "top_p")
FINISHED = {"length": "incomplete"}
"""Status by the reason of a finish; of any other "completed"."""


def response_document(
    request_id: str,
    created: int,
    model: str,
    status: str,
    *,
    text: str | None = None,
    usage: Mapping[str, int] | None = None,
    error: str = "",
    tier: str = "default",
    body: ResponsesBody | None = None,
) -> dict[str, Any]:
    """`text`: of its message, None for none yet. `error`: of one that failed. `body`: of the request, where it is known."""
    return {
        "id": request_id,
        "object": "response",
        "created_at": created,
        "status": status,
        "error": {"code": "server_error", "message": error} if error else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": model,
        "output": [] if text is None else [_message(request_id, status, _part(text))],
        "parallel_tool_calls": False,
        "service_tier": tier,
        "tool_choice": "none",
        "tools": [],
        **{name: getattr(body, name, None) for name in ECHOED},
        "usage": usage
        and {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def of_completion(chat: Mapping[str, Any], body: ResponsesBody | None) -> dict[str, Any]:
    """The response of a chat's completion."""
    (choice,) = chat["choices"]
    status, text = FINISHED.get(choice["finish_reason"], "completed"), choice["message"]["content"]
    more = {"text": text, "usage": chat["usage"], "tier": chat["service_tier"], "body": body}
    return response_document(chat["id"], chat["created"], chat["model"], status, **more)


def _message(request_id: str, status: str, *content: Mapping[str, Any]) -> dict[str, Any]:
    """The one item of a response's output."""
    return {"type": "message", "id": f"msg_{request_id}", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseForm(ChunkForm):
    """Typed events of one response: each method gives whole events in place of a chunk."""

    def __init__(self, call: Call, created: int, body: ResponsesBody) -> None:
        self._call, self._created, self._body = call, created, body
        self._text = ""
        self._status = "completed"
        self._numbers = count()
        self._place = {"item_id": f"msg_{call.request_id}", "output_index": 0, "content_index": 0}

    def begin(self) -> str:
        return "".join(self._response(kind, "in_progress") for kind in ("created", "in_progress"))

    def role(self, index: int) -> str:
        item = _message(self._call.request_id, "in_progress")
        added = self._event("output_item.added", output_index=index, item=item)
        return added + self._event("content_part.added", **self._place, part=_part(""))

    def text(self, index: int, text: str, logprobs: Mapping[str, Any] | None) -> str:
        self._text += text
        return self._event("output_text.delta", **self._place, delta=text, logprobs=[])

    def finish(self, index: int, reason: str) -> str:
        self._status, part = FINISHED.get(reason, "completed"), _part(self._text)
        done = self._event("output_text.done", **self._place, text=self._text, logprobs=[])
        done += self._event("content_part.done", **self._place, part=part)
        return done + self._event("output_item.done", output_index=index, item=_message(self._call.request_id, self._status, part))

    def usage(self, usage: Mapping[str, int]) -> str:
        return self._response(self._status, self._status, text=self._text, usage=usage)

    def failure(self, error: QlmError) -> str:
        return self._response("failed", "failed", error=error_document(error, chat=True, names=PARAMETERS)["message"])

    def _response(self, kind: str, status: str, **fields: Any) -> str:
        call = self._call
        more = {"tier": call.tier, "body": self._body, **fields}
        return self._event(kind, response=response_document(call.request_id, self._created, call.model, status, **more))

    def _event(self, kind: str, **fields: object) -> str:
        document = {"type": f"response.{kind}", **fields, "sequence_number": next(self._numbers)}
        return f"event: response.{kind}\ndata: {json.dumps(document, separators=(',', ':'))}\n\n"
