"""From a body and its headers to the requests of gateway.proto that it stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qlm.api.v1.request_pb2 import ChatMessage, ChatPrompt, Request, SamplingParams, TokenPrompt
from qlm_core.vocabulary.errors import invalid_field
from qlm_gateway.front.http.bodies import Body, ChatBody, CompletionBody, Message, ResponseFormat
from qlm_gateway.front.http.objectives import PRIORITY, SECONDS, expiry_s_of, objective_of
from qlm_gateway.front.http.settings import HttpSettings
from qlm_gateway.front.http.tools import ToolUse, use_tools

IDEMPOTENCY_KEY = "Idempotency-Key"
LAST_EVENT_ID = "Last-Event-ID"
MODE = "x-qlm-mode"
KEEP_ALIVE = "x-qlm-keep-alive"
READ_TIMEOUT = "x-stainless-read-timeout"
"""Seconds without a byte after which OpenAI's client gives up."""
COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that names none, as the API has it."""
_SAME_NAME = (
    "max_tokens", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "seed",
)  # fmt: skip
_MORE_OF_MESSAGE = ("name", "tool_calls", "tool_call_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventId:
    """The id of an event: the call's request id, when it was accepted (seconds since the epoch), and how many tokens of each choice were
    streamed up to this event."""

    request_id: str
    created: int
    offsets: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.request_id}/{self.created}/{','.join(map(str, self.offsets))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`requests`: one for each choice, those of a prompt in a row, `choices_per_prompt` of them; `ids`: theirs, which admission
    changes in the messages; the first is the call's. `keyed`: the client named it. `resume`: the last event that a client of the stream
    has. `names`: the name of its objective in errors. `read_timeout_s`: the silence after which the client gives up, else infinite.
    `keep_alive_s`: longest silence of a stream. `positions`: its comments hold the request's position. `tools`: how its answers are read,
    None where they are text."""

    chat: bool
    model: str
    request_id: str
    keyed: bool
    ids: tuple[str, ...]
    requests: tuple[Request, ...]
    choices_per_prompt: int
    enqueue: bool
    stream: bool
    include_usage: bool
    tier: str
    names: Mapping[str, str]
    resume: EventId | None
    read_timeout_s: float
    keep_alive_s: float
    positions: bool
    tools: ToolUse | None = None


def no_tools(_model: str) -> str:
    """No model's ToolForm is known."""
    return ""


def read_call(
    body: Body, headers: Mapping[str, str], settings: HttpSettings, new_id: str, tool_form: Callable[[str], str] = no_tools
) -> Call:
    """`new_id`: for a call without an idempotency key. `tool_form`: the ToolForm of a model, "" for none. Raises InvalidRequest."""
    key = headers.get(IDEMPOTENCY_KEY, "")
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise invalid_field("stream_options", "absent without stream")
    requests = tuple(_requests(body, settings.choices_max))
    tools = None
    if isinstance(body, ChatBody):
        for request in requests:
            tools = use_tools(body, tool_form(body.model), request.chat, request.sampling)
    if tools is not None and (LAST_EVENT_ID in headers or headers.get(MODE, "wait") != "wait"):
        raise invalid_field("tools", f"absent with {LAST_EVENT_ID} and with {MODE}: enqueue")
    output_tokens = requests[0].sampling.max_tokens
    slo, tier, objective = objective_of(headers, body.service_tier, settings, priority=body.priority, output_tokens=output_tokens)
    expiry_s, read_timeout_s = expiry_s_of(headers), _read_timeout_s(headers)
    resume = _event_id(headers[LAST_EVENT_ID], key, len(requests)) if stream and LAST_EVENT_ID in headers else None
    request_id = key or (new_id if resume is None else resume.request_id)
    for index, request in enumerate(requests):
        request.request_id = f"{request_id}.{index}" if index else request_id
        if slo is not None:
            request.slo.CopyFrom(slo)
        if expiry_s is not None:
            request.expire_after_s = expiry_s
    return Call(
        chat=isinstance(body, ChatBody),
        model=body.model,
        request_id=request_id,
        keyed=bool(key),
        ids=tuple(each.request_id for each in requests),
        requests=requests,
        choices_per_prompt=body.n or 1,
        enqueue=_is_enqueued(headers, len(requests), stream=stream),
        stream=stream,
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        tier=tier,
        names={SECONDS: objective, PRIORITY: objective},
        resume=resume,
        read_timeout_s=read_timeout_s,
        keep_alive_s=min(settings.keep_alive_s, read_timeout_s / 2),
        positions=_one_of(KEEP_ALIVE, ("comment", "position"), headers) == "position" and stream,
        tools=tools,
    )


def _requests(body: Body, choices_max: int) -> Iterator[Request]:
    """In the order of their choices."""
    prompts = [_chat_request(body)] if isinstance(body, ChatBody) else _completion_requests(body)
    choices = body.n or 1
    if len(prompts) * choices > choices_max:
        raise invalid_field("n" if choices > 1 else "prompt", f"at most {choices_max} choices a call")
    sampling = _sampling(body)
    for prompt in prompts:
        for index in range(choices):
            request = Request(model=body.model, sampling=sampling)
            request.MergeFrom(prompt)
            if body.seed is not None:  # else the choices would be one
                request.sampling.seed = min(body.seed + index, (1 << 63) - 1)
            yield request


def _chat_request(body: ChatBody) -> Request:
    return Request(chat=ChatPrompt(messages=[_message(each) for each in body.messages]))


def _message(message: Message) -> ChatMessage:
    content = message.content
    more = {name: value for name in _MORE_OF_MESSAGE if (value := getattr(message, name)) is not None}
    if message.tool_calls:
        more["tool_calls"] = [_parsed_call(each) for each in message.tool_calls]
    return ChatMessage(
        role="system" if message.role == "developer" else message.role,
        content=content if isinstance(content, str) else "\n".join(part.text for part in content or ()),
        more_json=json.dumps(more) if more else "",
    )


def _parsed_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """With arguments as chat templates read them: an object, where they are the JSON of one."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments)}}
    except (ValueError, RecursionError):
        return call


def _completion_requests(body: Body) -> list[Request]:
    assert isinstance(body, CompletionBody), "the other kind of body"
    prompt = body.prompt
    if not prompt:
        raise invalid_field("prompt", "a text, token ids or a list of either")
    prompts: Sequence[object] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    return [Request(text=each) if isinstance(each, str) else Request(tokens=TokenPrompt(ids=each)) for each in prompts]  # type: ignore[arg-type]


def _sampling(body: Body) -> SamplingParams:
    sampling = SamplingParams(**{name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None})
    if body.top_k is not None:
        sampling.top_k = max(0, body.top_k)  # -1: all
    if body.stop is not None:
        sampling.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop)
    if body.response_format is not None:
        _constrain(sampling, body.response_format)
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            sampling.max_tokens = body.max_completion_tokens
        if body.logprobs:
            sampling.logprobs = body.top_logprobs or 0
        elif body.top_logprobs:
            raise invalid_field("top_logprobs", "absent without logprobs")
    elif isinstance(body, CompletionBody):
        sampling.max_tokens = sampling.max_tokens or COMPLETION_TOKENS
        if body.logprobs is not None:
            sampling.logprobs = body.logprobs
    return sampling


def _constrain(sampling: SamplingParams, wanted: ResponseFormat) -> None:
    if wanted.type == "json_object":
        sampling.json_schema = '{"type": "object"}'
    elif wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise invalid_field("response_format.json_schema", "present")
        sampling.json_schema = json.dumps(wanted.json_schema.document)


def _is_enqueued(headers: Mapping[str, str], choices: int, *, stream: bool) -> bool:
    mode = _one_of(MODE, ("wait", "enqueue"), headers)
    if mode == "enqueue" and (stream or choices > 1):
        raise invalid_field("stream" if stream else "n", f"absent with {MODE}: enqueue")
    return mode == "enqueue"


def _one_of(header: str, values: Sequence[str], headers: Mapping[str, str]) -> str:
    """A header's value, the first one where it is absent. Raises InvalidRequest."""
    value = headers.get(header, values[0])
    if value not in values:
        raise invalid_field(header, " or ".join(values))
    return value


def _read_timeout_s(headers: Mapping[str, str]) -> float:
    """Clients send it by themselves, so a wrong value is none."""
    try:
        seconds = float(headers.get(READ_TIMEOUT, ""))
    except ValueError:
        return math.inf
    return seconds if seconds > 0.0 else math.inf


def _event_id(text: str, key: str, choices: int) -> EventId:
    try:
        request_id, created, offsets = text.rsplit("/", 2)
        found = EventId(request_id=request_id, created=int(created), offsets=tuple(map(int, offsets.split(","))))
    except ValueError:
        raise invalid_field(LAST_EVENT_ID, "the id of an event of this call") from None
    if (
        not request_id
        or len(found.offsets) != choices
        or (key and key != request_id)
        or not all(0 <= each < 1 << 32 for each in found.offsets)
    ):
        raise invalid_field(LAST_EVENT_ID, "the id of an event of this call")
    return found
