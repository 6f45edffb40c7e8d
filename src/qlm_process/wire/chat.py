"""Chats of request.proto as values."""

from __future__ import annotations

import json
from typing import Any

from qlm.api.v1.request_pb2 import Request
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import invalid_field


def chat_from_proto(request: Request) -> ChatPrompt:
    """The chat of a request whose prompt is one. Raises InvalidRequest for JSON that is no object, or that names what has a field."""
    chat = request.chat
    return ChatPrompt(
        messages=tuple(
            {"role": each.role, "content": each.content, **_object("chat.messages.more_json", each.more_json, {"role", "content"})}
            for each in chat.messages
        ),
        variables=_object("chat.variables_json", chat.variables_json, {"messages", "add_generation_prompt"}),
        continue_final_message=chat.continue_final_message,
        control_tokens=request.control_tokens_in_text,
    )


def _object(field: str, text: str, taken: set[str]) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid_field(field, "a JSON object of UTF-8 strings") from error
    if not isinstance(found, dict) or found.keys() & taken:
        raise invalid_field(field, f"a JSON object without {' and '.join(sorted(taken))}")
    return found
