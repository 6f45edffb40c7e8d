"""Tools over HTTP: their form for a model, and how its answers are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qlm_core.vocabulary.errors import InvalidRequest
from qlm_gateway.front.http.bodies import ChatBody, read_body
from qlm_gateway.front.http.calls import Call, read_call
from qlm_gateway.front.http.settings import HttpSettings
from qlm_gateway.front.http.tools import ToolForm, ToolReader, ToolUse, message_of, tool_form_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}} for name in ("weather", "time")]
HERMES, JSON = ToolUse(form=ToolForm.HERMES), ToolUse(form=ToolForm.JSON)
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'


def called(*names: str) -> list[tuple[str, str]]:
    return [(name, '{"city": "Paris"}') for name in names]


@pytest.mark.parametrize(
    ("use", "text", "content", "calls"),
    [
        (HERMES, "Hello.", "Hello.", []),
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", None, called("weather")),
        (HERMES, f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL.replace('weather', 'time')}</tool_call>\n", "I look.",
         called("weather", "time")),
        (HERMES, f"<tool_call>{CALL}", None, called("weather")),
        (HERMES, "<tool_call>{broken</tool_call> so", "<tool_call>{broken</tool_call> so", []),
        (HERMES, "1 <tool_ 2 <", "1 <tool_ 2 <", []),
        (HERMES, "<tool_call>unended", "<tool_call>unended", []),
        (HERMES, " \n", " \n", []),
        (JSON, CALL.replace("arguments", "parameters"), None, called("weather")),
        (JSON, f"[{CALL}, {CALL.replace('weather', 'time')}]", None, called("weather", "time")),
        (JSON, "Hello {", "Hello {", []),
        (JSON, '{"name": 3}', '{"name": 3}', []),
        (JSON, "[" * 100_000, "[" * 100_000, []),
        (ToolUse(form=ToolForm.JSON, single=True), f"[{CALL}, {CALL}]", None, called("weather")),
        (ToolUse(form=ToolForm.ARGUMENTS, name="weather"), '{"city": "Paris"}', None, called("weather")),
    ],
)  # fmt: skip
def test_calls_are_read_and_what_is_none_is_content(use: ToolUse, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    reader = ToolReader(use, "r")
    message = message_of(reader, text)
    assert message["content"] == content
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())] == calls
    assert len({call["id"] for call in message.get("tool_calls", ())}) == len(calls)
    by_character = ToolReader(use, "r")
    deltas = [delta for character in text[:1_000] for delta in by_character.feed(character)]
    assert "".join(delta.get("content", "") for delta in [*deltas, *by_character.end()]) == (content or "")[:1_000]
    wanted = "tool_calls" if calls and use.form is not ToolForm.ARGUMENTS else "stop"
    assert (reader.finish("stop"), reader.finish("length")) == (wanted, "length")


PIECES = st.lists(
    st.sampled_from([f"<tool_call>{CALL}</tool_call>", "<tool_call>", "</tool_call>", CALL, "<tool", " ", "\n", "a", "{", "[", "]", ","]),
    max_size=8,
)


@example(f"a{CALL}", [1], JSON)
@given(
    PIECES.map("".join),
    st.lists(st.integers(1, 9), max_size=40),
    st.sampled_from([HERMES, JSON, ToolUse(form=ToolForm.ARGUMENTS, name="f")]),
)
def test_pieces_of_any_size_give_the_same_whole(text: str, sizes: list[int], use: ToolUse) -> None:
    whole, reader = message_of(ToolReader(use, "r"), text), ToolReader(use, "r")
    deltas, at = [], 0
    for size in [*sizes, len(text)]:
        deltas += reader.feed(text[at : at + size])
        at += size
    deltas += reader.end()
    assert "".join(delta.get("content", "") for delta in deltas) == (whole["content"] or "")
    made: dict[int, str] = {}
    for (call,) in (delta["tool_calls"] for delta in deltas if "tool_calls" in delta):
        made[call["index"]] = made.get(call["index"], "") + call["function"]["arguments"]
    assert list(made.values()) == [call["function"]["arguments"] for call in whole.get("tool_calls", ())]


def call_of(form: str = "hermes", headers: dict[str, str] | None = None, **fields: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS, **fields}
    return read_call(
        read_body(ChatBody, json.dumps(body).encode(), refuse_unknown=True), headers or {}, HttpSettings(), "id", lambda _: form
    )


def test_the_chat_template_gets_the_tools_as_they_were_sent() -> None:
    call = call_of(n=2)
    assert call.tools == HERMES
    assert [json.loads(request.chat.variables_json) for request in call.requests] == [{"tools": TOOLS}] * 2
    assert not call.requests[0].sampling.json_schema
    assert call_of(tool_choice="none").tools is None
    assert not call_of(tool_choice="none").requests[0].chat.variables_json
    assert call_of("", tools=None).tools is None


def test_a_wanted_call_constrains_the_answer() -> None:
    named = call_of("", tool_choice={"type": "function", "function": {"name": "time"}})
    assert named.tools == ToolUse(form=ToolForm.ARGUMENTS, name="time")
    assert json.loads(named.requests[0].sampling.json_schema) == PARAMETERS
    some = call_of("", tool_choice="required", parallel_tool_calls=False)
    assert some.tools == ToolUse(form=ToolForm.JSON, single=True)
    schema = json.loads(some.requests[0].sampling.json_schema)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [each["properties"]["name"] for each in schema["items"]["anyOf"]] == [{"enum": ["weather"]}, {"enum": ["time"]}]


@pytest.mark.parametrize(
    ("form", "headers", "fields", "field"),
    [
        ("", {}, {}, "tools"),
        ("hermes", {}, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ("hermes", {}, {"tools": [], "tool_choice": "required"}, "tool_choice"),
        ("hermes", {}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ("hermes", {}, {"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ("hermes", {}, {"logprobs": True}, "logprobs"),
        ("hermes", {"x-qlm-mode": "enqueue"}, {}, "tools"),
        ("hermes", {"Last-Event-ID": "id/1/0"}, {"stream": True}, "tools"),
    ],
)
def test_what_cannot_be_done_names_its_field(form: str, headers: dict[str, str], fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call_of(form, headers, **fields)
    assert refused.value.details["field"] == field


def test_earlier_calls_reach_the_template_as_objects() -> None:
    sent = {"id": "c", "type": "function", "function": {"name": "time", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [sent, {**sent, "function": {"name": "time", "arguments": "{"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    _, answer, result = call_of(messages=messages).requests[0].chat.messages
    first, broken = json.loads(answer.more_json)["tool_calls"]
    assert (first["function"]["arguments"], broken["function"]["arguments"]) == ({"city": "Paris"}, "{")
    assert (result.role, json.loads(result.more_json)) == ("tool", {"tool_call_id": "c"})


def test_the_form_of_a_model_is_read_from_its_chat_template() -> None:
    assert tool_form_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert tool_form_of('{% if tools %}{"name": f, "parameters": p}{% endif %}') == "json"
    assert tool_form_of("{{ messages }}") == tool_form_of("{% if tools %}<tool_call><function=f>{% endif %}") == ""
