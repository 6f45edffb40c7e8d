"""A chat as clients send it and as chat templates read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """`messages`: at least one, each with `role`, `content` (text) and perhaps other fields, as JSON values. `variables`: more variables of
    the chat template, such as `tools`. `continue_final_message`: the answer continues the last message. `control_tokens`: as
    `control_tokens_in_text` of request.proto."""

    messages: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    control_tokens: bool = False

    def plain_text(self) -> str:
        """The chat as models without a template read it: other fields and variables as JSON."""
        lines = [_json(self.variables)] if self.variables else []
        for message in self.messages:
            more = {name: value for name, value in message.items() if name not in ("role", "content")}
            lines.append(f"<|{message['role']}|>{message['content']}{_json(more) if more else ''}")
        return "\n".join(lines) + ("" if self.continue_final_message else "\n<|assistant|>")


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
