"""The body of `POST /v1/responses`, and the chat that it stands for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qlm_core.vocabulary.errors import invalid_field
from qlm_gateway.admission.rules import MESSAGES_MAX
from qlm_gateway.front.http.bodies import HARMLESS_VALUES, Body, BodyPart, ChatBody, Message, PositiveUint32

REFUSED_FIELDS = ("conversation", "previous_response_id", "prompt", "text", "tool_choice", "tools", "top_logprobs")
"""Fields of the API that this route does not support."""
PLAIN_TEXT = {"format": {"type": "text"}}
PARAMETERS = {"messages": "input", "max_tokens": "max_output_tokens"}
"""Parameters of a chat by their names here."""
_SAME_NAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "seed",
    "stop", "stream", "priority", "service_tier",
)  # fmt: skip


class InputPart(BodyPart):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputItem(BodyPart):
    type: Literal["message"] = "message"
    role: str
    content: str | Annotated[list[InputPart], Field(fail_fast=True)]

    def message(self) -> Message:
        content = self.content
        return Message(role=self.role, content=content if isinstance(content, str) else "\n".join(part.text for part in content))


class ResponsesBody(Body):
    input: str | Annotated[list[InputItem], Field(fail_fast=True, max_length=MESSAGES_MAX - 1)]
    instructions: str | None = None
    max_output_tokens: PositiveUint32 | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None

    def chat(self) -> ChatBody:
        """Raises InvalidRequest for what a chat cannot do."""
        for name in REFUSED_FIELDS:
            if (self.model_extra or {}).get(name) not in (*HARMLESS_VALUES, PLAIN_TEXT):
                raise invalid_field(name, "absent: it is not supported")
        if self.background and self.stream:
            raise invalid_field("background", "absent with stream")
        if (self.n or 1) > 1:
            raise invalid_field("n", "1, or absent")
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        said = [Message(role="system", content=self.instructions)] if self.instructions else []
        same = {name: getattr(self, name) for name in _SAME_NAME}
        return ChatBody(messages=[*said, *(item.message() for item in items)], max_tokens=self.max_output_tokens, **same)
