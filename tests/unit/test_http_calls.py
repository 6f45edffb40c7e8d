"""Bodies and headers of the OpenAI API, translated: hostile ones are refused by name and in time, others become requests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm.api.v1.request_pb2 import Logprobs
from qlm_core.vocabulary.errors import ConfigError, InvalidRequest, QlmError, QueueFull, RequestEnded
from qlm_core.vocabulary.overload import WOULD_BE_LATE
from qlm_gateway.front.http.answers import logprobs_of
from qlm_gateway.front.http.bodies import Body, ChatBody, CompletionBody, read_body
from qlm_gateway.front.http.calls import Call, EventId, read_call
from qlm_gateway.front.http.errors import error_document, error_headers, status_of
from qlm_gateway.front.http.settings import HttpSettings
from qlm_gateway.wire import draft_of
from qlm_process.settings import SecuritySettings

SETTINGS = HttpSettings()
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Why?"}]}
EXAMPLES = 150


def call_of(cls: type[Body], body: object, headers: Mapping[str, str] | None = None) -> Call:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_call(read_body(cls, data, refuse_unknown=False), headers or {}, SETTINGS, "new")


def test_messages_become_those_of_the_proto() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "developer", "content": "Be short.", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    ]
    (request,) = call_of(ChatBody, {"model": "m", "messages": messages}).requests
    assert [(each.role, each.content) for each in request.chat.messages] == [
        ("system", "Be short."), ("user", "a\nb"), ("assistant", ""), ("tool", "5"),
    ]  # fmt: skip
    assert [json.loads(each.more_json or "{}") for each in request.chat.messages] == [
        {"name": "boss"}, {}, {"tool_calls": [{**calls[0], "function": {"name": "f", "arguments": {}}}]}, {"tool_call_id": "c"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "text"}, ""),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "array"}}}, {"type": "array"}),
    ],
)
def test_response_formats_become_schemas(wanted: object, schema: object) -> None:
    (request,) = call_of(ChatBody, {**CHAT, "response_format": wanted}).requests
    assert (json.loads(request.sampling.json_schema) if request.sampling.json_schema else "") == schema


def test_choices_have_ids_and_seeds_of_their_own() -> None:
    call = call_of(ChatBody, {**CHAT, "n": 3, "seed": 5}, {"Idempotency-Key": "key"})
    assert call.ids == ("key", "key.1", "key.2")
    assert [each.sampling.seed for each in call.requests] == [5, 6, 7]
    assert [each.request_id for each in call_of(ChatBody, CHAT).requests] == ["new"]


def test_an_event_id_is_read_back_also_with_slashes_in_the_request_id() -> None:
    event = EventId(request_id="a/b c/1", created=7, offsets=(3,))
    call = call_of(ChatBody, {**CHAT, "stream": True}, {"Last-Event-ID": str(event)})
    assert (call.resume, call.request_id) == (event, "a/b c/1")


@pytest.mark.parametrize(("text", "seconds"), [("1500ms", 1.5), ("1m30s", 90.0), (".5h", 1800.0), ("2.s", 2.0), ("10us", 1e-5)])
def test_a_ttl_is_a_duration_as_go_writes_it(text: str, seconds: float) -> None:
    (request,) = call_of(ChatBody, CHAT, {"x-llm-d-inference-ttl": text}).requests
    assert request.expire_after_s == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "0s", "-1s", "1s ", "1 s", "1d", "1.2.3s", "s", "1s" * 33])
def test_what_is_no_duration_is_refused_by_the_name_of_its_header(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call_of(ChatBody, CHAT, {"x-llm-d-inference-ttl": text})
    assert refused.value.details["field"] == "x-llm-d-inference-ttl"


@pytest.mark.parametrize(
    ("text", "read_s", "silence_s"),
    [
        ("600", 600.0, 15.0),
        ("8.0", 8.0, 4.0),
        *((wrong, math.inf, 15.0) for wrong in ("nan", "0", "soon", None)),
    ],
)
def test_a_stream_is_silent_for_half_of_what_its_client_reads_at_most(text: str | None, read_s: float, silence_s: float) -> None:
    call = call_of(ChatBody, {**CHAT, "stream": True}, {} if text is None else {"x-stainless-read-timeout": text})
    assert (call.read_timeout_s, call.keep_alive_s) == (read_s, silence_s)


def test_a_hint_that_the_client_does_not_follow_offers_to_enqueue() -> None:
    for reason, retry_s, offer in (
        (WOULD_BE_LATE, 121, "x-qlm-mode: enqueue"),
        (None, 121, "Send it again then"),
        (WOULD_BE_LATE, 120, ""),
    ):
        error = QueueFull("late", reason=reason, details={"retry_after_s": f"{retry_s}"})
        message = error_document(error)["message"]
        assert (offer in message) if offer else message == "late"
        assert error_headers(error)["Retry-After"] == f"{retry_s}"


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (RequestEnded("this server does not take top_k", reason="ENGINE_FAILURE"), 400, "invalid_request_error", "top_k"),
        (RequestEnded("json_schema: of no kind that it knows", reason="ENGINE_FAILURE"), 400, "invalid_request_error", "response_format"),
        (RequestEnded("the prompt has no tokens", reason="ENGINE_FAILURE"), 400, "invalid_request_error", None),
        (RequestEnded("it failed with top_k", reason="ATTEMPTS_EXHAUSTED"), 500, "server_error", None),
        (QueueFull("full", details={"bound": "memory"}), 503, "server_error", None),
        (QueueFull("full", details={"bound": "tenant"}), 429, "rate_limit_error", None),
    ],
)
def test_an_error_says_whose_it_is(error: QlmError, status: int, kind: str, param: str | None) -> None:
    document = error_document(error)
    assert (status_of(error), document["type"], document["param"]) == (status, kind, param)


def test_logprobs_hold_no_infinity() -> None:
    logprobs = Logprobs(of_token=[-float("inf")], top_token_ids=[2], of_top=[-float("inf")])
    for chat in (True, False):
        json.dumps(logprobs_of(logprobs, [1], str, chat=chat), allow_nan=False)


@pytest.mark.parametrize("address", ["0.0.0.0:80", "[::]:80", "10.1.2.3:80", "example.org:80"])
def test_other_hosts_are_served_only_where_a_setting_says_so(address: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.key_file.*security\.no_auth"):
        SecuritySettings().check_listen("listen", address)
    with pytest.raises(ConfigError, match=r"tls_cert_file.*no_tls"):
        SecuritySettings(key_file="keys").check_listen("listen", address)
    tls = {"tls_cert_file": "a", "tls_key_file": "b", "tls_ca_file": "c"}
    for allowed in ({"no_auth": True}, {"key_file": "keys", "no_tls": True}, {"key_file": "keys", **tls}):
        SecuritySettings.model_validate(allowed).check_listen("listen", address)
    assert HttpSettings(listen=address, admin_listen=address).listen == address


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.0.1:80", "[::1]:80", "localhost:80", "unix:/run/qlm.sock"])
def test_loopback_needs_no_setting(address: str) -> None:
    SecuritySettings().check_listen("listen", address)
    SecuritySettings(key_file="keys").check_listen("listen", address)


# Hostile --------------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "best_of", "logit_bias", "whatever"}))
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "Idempotency-Key",
            "Last-Event-ID",
            "x-qlm-mode",
            "x-qlm-slo-seconds",
            "x-qlm-slo-kind",
            "x-qlm-priority",
            "x-llm-d-slo-ttft-ms",
            "x-llm-d-slo-tpot-ms",
            "x-llm-d-inference-ttl",
            "x-llm-d-inference-objective",
            "x-stainless-read-timeout",
            "x-qlm-keep-alive",
        ]
    ),
    st.text(max_size=40)
    | st.sampled_from(["enqueue", "1", "nan", "-inf", "1e999", "first_token", "9" * 5000, "new/1/1", "1h1ms", "position"]),
    max_size=3,
)


def check_call(cls: type[Body], body: object, headers: Mapping[str, str]) -> None:
    try:
        call = call_of(cls, body, headers)
        for request in call.requests:
            draft_of(request)
    except InvalidRequest as error:
        refusal = error
    else:
        assert 1 <= len(call.requests) <= SETTINGS.choices_max
        assert len(set(call.ids)) == len(call.requests)
        return
    assert "field" in refusal.details


@given(fields=st.dictionaries(FIELDS, VALUES, max_size=5), headers=HEADERS)
@settings(max_examples=EXAMPLES)
def test_hostile_fields_are_refused_by_name_or_taken(fields: dict[str, object], headers: dict[str, str]) -> None:
    check_call(ChatBody, {**CHAT, **fields}, headers)
    check_call(CompletionBody, {"model": "m", "prompt": "x", **fields}, headers)


@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=EXAMPLES)
def test_bytes_that_are_no_body_are_refused(body: bytes) -> None:
    for cls in (ChatBody, CompletionBody):
        with pytest.raises(InvalidRequest):
            call_of(cls, body)


LARGE = 4 << 20


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prompt": ' + b"[" * LARGE,
        b'{"model": "m", "prompt": "x", "seed": ' + b"9" * LARGE + b"}",
        b'{"model": "m", "prompt": "x", "user": ' + b'{"a":' * (LARGE // 5) + b"}",
        b'{"model": "m", "prompt": [' + b"1," * (LARGE // 2) + b'"x"]}',
        b'{"model": "m", "prompt": [' + b'"x",' * (LARGE // 4) + b"1]}",
        b'{"model": "m", "prompt": [' + b"[],-" * (LARGE // 4) + b"1]}",
        b'{"model": "m", "messages": [' + b"0," * (LARGE // 2) + b"0]}",
        b'{"model": "m", "prompt": "x", "stop": [' + b"0," * (LARGE // 2) + b"0]}",
        b'{"model": "m", "prompt": ["\\ud800"]}',
    ],
    ids=range(9),
)
@pytest.mark.timeout(60)
def test_large_hostile_bodies_are_refused_in_a_short_time(body: bytes) -> None:
    for cls in (ChatBody, CompletionBody):
        with pytest.raises(InvalidRequest) as refused:
            call_of(cls, body)
        assert len(refused.value.message) < 300
