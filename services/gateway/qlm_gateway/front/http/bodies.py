"""Bodies of calls, as clients of the OpenAI API send them. Rules of values are those of admission: here are types alone."""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qlm_core.vocabulary.errors import InvalidRequest, invalid_field
from qlm_gateway.admission.rules import MESSAGES_MAX

Uint32 = Annotated[int, Field(ge=0, lt=1 << 32)]
PositiveUint32 = Annotated[int, Field(ge=1, lt=1 << 32)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]

TOOLS_MAX = 128
REFUSED_FIELDS = (
    "audio",
    "best_of",
    "echo",
    "function_call",
    "functions",
    "logit_bias",
    "modalities",
    "suffix",
    "web_search_options",
)
"""Fields of the API that QLM does not support."""
HARMLESS_VALUES: tuple[object, ...] = (None, False, [], {}, "", "none", "auto", ["text"])
"""Values with which such a field asks for nothing."""


class BodyPart(BaseModel):
    """An object within a body."""

    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(BodyPart):
    include_usage: bool | None = None


class TextPart(BodyPart):
    type: Literal["text"]
    text: str


class Message(BodyPart):
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


class Function(BodyPart):
    model_config = ConfigDict(extra="allow", strict=True)  # the chat template may read more

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    parameters: dict[str, Any] | None = None


class Tool(BodyPart):
    type: Literal["function"]
    function: Function


class NamedFunction(BodyPart):
    name: str


class NamedTool(BodyPart):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(BodyPart):
    # The field is named `schema`, which pydantic's own method has.
    document: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(BodyPart):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(BaseModel):
    """Fields of both kinds of calls. An absent field and null are the same."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    max_tokens: PositiveUint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    n: PositiveUint32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    user: Any = None


class ChatBody(Body):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MESSAGES_MAX)]
    max_completion_tokens: PositiveUint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(Body):
    """The body of `POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Uint32], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[Uint32], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    logprobs: Uint32 | None = None


_PARTS = (ChatBody, CompletionBody, Message, TextPart, StreamOptions, ResponseFormat, Tool, Function)
_FIELDS = frozenset().union(*(part.model_fields for part in _PARTS))

B = TypeVar("B", bound=Body)


def read_body(cls: type[B], body: bytes, *, refuse_unknown: bool) -> B:
    """A checked body. Raises InvalidRequest, whose detail `field` is the parameter at fault; its message quotes no value."""
    try:
        read = cls.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error, _FIELDS | cls.model_fields.keys()) from None
    for name, value in (read.model_extra or {}).items():
        if name in REFUSED_FIELDS:
            if value not in HARMLESS_VALUES and not (name == "best_of" and value == (read.n or 1)):
                raise invalid_field(name, "absent: it is not supported")
        elif refuse_unknown:
            raise invalid_field(name[:64], "absent: no such field (gateway.http.unknown_fields)")
    return read


def _invalid(error: ValidationError, fields: Set[str]) -> InvalidRequest:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = max(errors, key=lambda each: len(each["loc"]))  # of a union, the member that got furthest
    if first["type"] == "json_invalid":
        return InvalidRequest("the body is not JSON", details={"field": "", "rule": "JSON"})
    path = ""
    for step in first["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in fields:  # others name a member of a union
            path += f".{step}" if path else step
    return InvalidRequest(f"{path or 'the body'}: {first['msg']}", details={"field": path, "rule": first["msg"]})
