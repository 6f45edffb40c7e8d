"""Tools of a chat: what the model is given of them, and its answer read as calls of them, whole or piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from qlm.api.v1.request_pb2 import ChatPrompt, SamplingParams
from qlm_core.vocabulary.errors import invalid_field
from qlm_gateway.front.http.bodies import ChatBody, NamedTool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OTHER_FORMS = ("<function=", "<arg_key>")
"""Marks of templates whose calls between OPEN and CLOSE are no JSON."""
CALL_ID_CHARACTERS = 9
"""As some chat templates want it."""

Delta = Mapping[str, Any]
"""`content`, or `tool_calls` with one element: fields of a chunk's delta."""


class ToolForm(StrEnum):
    """How a model writes calls. HERMES: an object of name and arguments between OPEN and CLOSE, anywhere in text (Qwen, Hermes). JSON: the
    whole answer is such an object, or a list (Llama 3). ARGUMENTS: the whole answer is the arguments of one named tool."""

    HERMES = "hermes"
    JSON = "json"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """`name`: of ARGUMENTS; `single`: only the first call counts."""

    form: ToolForm
    name: str = ""
    single: bool = False


def use_tools(body: ChatBody, form: str, chat: ChatPrompt, sampling: SamplingParams) -> ToolUse | None:
    """Gives the tools of a body to its request; None where it uses none. `form`: a ToolForm, "" where the model's is not known. A choice of
    a tool, or of any, constrains the answer to JSON. Raises InvalidRequest."""
    choice = body.tool_choice or "auto"
    if not body.tools:
        if choice in ("auto", "none"):
            return None
        raise invalid_field("tool_choice", "auto or none without tools")
    if choice == "none":
        return None
    if body.logprobs:
        raise invalid_field("logprobs", "absent with tools")
    if choice == "auto" and not form:
        raise invalid_field("tools", "absent: how this model writes calls is not known (models.tool_calls), but a tool_choice may name one")
    chat.variables_json = json.dumps({"tools": [tool.model_dump(exclude_none=True) for tool in body.tools]})
    single = body.parallel_tool_calls is False
    if choice == "auto":
        return ToolUse(form=ToolForm(form), single=single)
    if body.response_format is not None and body.response_format.type != "text":
        raise invalid_field("response_format", "absent with a tool_choice that wants a call")
    schemas = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in body.tools}
    if isinstance(choice, NamedTool):
        if choice.function.name not in schemas:
            raise invalid_field("tool_choice", "the name of one of tools")
        sampling.json_schema = json.dumps(schemas[choice.function.name])
        return ToolUse(form=ToolForm.ARGUMENTS, name=choice.function.name)
    calls = [
        {"type": "object", "properties": {"name": {"enum": [name]}, "arguments": schema}, "required": ["name", "arguments"]}
        for name, schema in schemas.items()
    ]
    sampling.json_schema = json.dumps({"type": "array", "minItems": 1, "items": {"anyOf": calls}, **({"maxItems": 1} if single else {})})
    return ToolUse(form=ToolForm.JSON, single=single)


def tool_form_of(template: str) -> str:
    """The ToolForm that a chat template asks a model for; "" for none that is known."""
    if OPEN in template:
        return "" if any(mark in template for mark in OTHER_FORMS) else ToolForm.HERMES
    return ToolForm.JSON if "tools" in template and '"parameters":' in template else ""


class ToolReader:
    """One answer. Text outside calls is content, and so are calls that cannot be parsed. Pieces of any size give the same whole."""

    def __init__(self, use: ToolUse, request_id: str) -> None:
        self._use = use
        self._request_id = request_id
        self._held = ""
        self._space = ""
        self._inside = False
        self._plain = False  # it began as no call of JSON, so that all of it is content
        self.calls = 0

    def feed(self, text: str) -> list[Delta]:
        """Returns the deltas that the next piece of text completes."""
        match self._use.form:
            case ToolForm.ARGUMENTS:
                return list(self._argue(text))
            case ToolForm.HERMES:
                return list(self._scan(text))
        self._held += text
        if self._held.lstrip()[:1] not in ("", "{", "["):
            self._plain = True
        return list(self._release()) if self._plain else []

    def end(self) -> list[Delta]:
        """Returns the remaining deltas at the end of the text."""
        found: list[Delta] = []
        if self._use.form is ToolForm.JSON and (calls := _calls_of(self._held)):
            self._held = ""
            found = [delta for call in calls for delta in self._call(*call)]
        elif self._inside:
            calls = _calls_of(self._held)
            found = [delta for call in calls for delta in self._call(*call)]
            self._held = "" if calls else OPEN + self._held
        found += self._release()
        if self._space and not self.calls:
            found.append({"content": self._space})
        return found

    def _argue(self, text: str) -> Iterator[Delta]:
        if not self.calls:
            yield from self._call(self._use.name, "")
        if text:
            yield {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}

    def _scan(self, text: str) -> Iterator[Delta]:
        self._held += text
        while True:
            if self._inside:
                body, closed, rest = self._held.partition(CLOSE)
                if not closed:
                    return
                calls = _calls_of(body)
                self._inside, self._held = False, rest
                for call in calls:
                    yield from self._call(*call)
                if not calls:
                    yield from self._say(OPEN + body + CLOSE)
                continue
            before, opened, rest = self._held.partition(OPEN)
            if opened:
                self._inside, self._held = True, rest
                yield from self._say(before)
                continue
            kept = next((size for size in range(len(OPEN) - 1, 0, -1) if before.endswith(OPEN[:size])), 0)
            self._held = before[len(before) - kept :]
            yield from self._say(before[: len(before) - kept])
            return

    def _release(self) -> Iterator[Delta]:
        held, self._held = self._held, ""
        yield from self._say(held)

    def _say(self, text: str) -> Iterator[Delta]:
        """Holds trailing blanks back: blanks around calls are no content."""
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        if content:
            yield {"content": content}

    def _call(self, name: str, arguments: str) -> Iterator[Delta]:
        self._space = ""
        if self._use.single and self.calls:
            return
        index, self.calls = self.calls, self.calls + 1
        digest = blake2b(f"{self._request_id}/{index}".encode(), digest_size=8).hexdigest()[:CALL_ID_CHARACTERS]
        function = {"name": name, "arguments": arguments}
        yield {"tool_calls": [{"index": index, "id": digest, "type": "function", "function": function}]}

    def finish(self, reason: str) -> str:
        """The finish reason of the whole answer."""
        return "tool_calls" if self.calls and reason == "stop" and self._use.form is not ToolForm.ARGUMENTS else reason


def message_of(reader: ToolReader, text: str) -> dict[str, Any]:
    """A whole answer as the message of a choice."""
    deltas = [*reader.feed(text), *reader.end()]
    content = "".join(delta["content"] for delta in deltas if "content" in delta)
    calls: list[dict[str, Any]] = []
    for (call,) in (delta["tool_calls"] for delta in deltas if "tool_calls" in delta):
        if "id" in call:
            calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"role": "assistant", "content": content or None, "refusal": None, **({"tool_calls": calls} if calls else {})}


def _calls_of(text: str) -> Sequence[tuple[str, str]]:
    """Names and arguments (JSON) of an object of a call, or of a list of such; () for anything else."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    calls = []
    for each in read if isinstance(read, list) else [read]:
        name = each.get("name") if isinstance(each, dict) else None
        arguments = each.get("arguments", each.get("parameters")) if isinstance(each, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return ()
        calls.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
    return calls
