"""The OpenAI API over HTTP on a real queue, with the official client: answers, streams, modes, objectives, limits and errors."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from yarl import URL

from qlm.errors import NotFound
from qlm_core.group import slo_class as class_of
from qlm_core.request import RequestKey, RequestState
from qlm_gateway.wire import admission_of
from qlm_queue.values import Bounds, LiveRequest

from .gateway_process import gateway_process
from .gateway_rig import MODEL, PATIENCE_S, GatewayRun, Rig, expected_tokens, open_rig, until

HTTP = {"listen": "127.0.0.1:0", "keep_alive_s": 0.05}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 6}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def text_of(tokens: list[int]) -> str:
    """As models without a tokenizer read."""
    return "".join(f" t{token}" for token in tokens)


def chat_text(count: int) -> str:
    """The test agent's answer to any chat."""
    return text_of(expected_tokens([0], count))


async def http_gateway(rig: Rig, **settings: Any) -> GatewayRun:
    return await rig.gateway(http={**HTTP, **settings})


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


@asynccontextmanager
async def opened(rig: Rig, **settings: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, aiohttp.ClientSession]]:
    """The official client of a new gateway, and a plain one."""
    gateway = await http_gateway(rig, **settings)
    url = gateway.gateway.http_url
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with client_of(url) as client, aiohttp.ClientSession(url, timeout=timeout) as session:
        yield client, session


async def state_of(rig: Rig, request_id: str) -> RequestState | None:
    try:
        return (await rig.queue.find(RequestKey("default", request_id))).state
    except NotFound:
        return None


async def until_state(rig: Rig, request_id: str, *states: RequestState | None) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await state_of(rig, request_id) not in states:
            await asyncio.sleep(0.005)


# Answers --------------------------------------------------------------------------------------------------------------


async def test_a_chat_is_answered_and_streamed_with_the_same_text(rig: Rig) -> None:
    rig.serve()
    async with opened(rig) as (client, _):
        answer = await client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"Idempotency-Key": "c1"})
        chat = ChatCompletion.model_validate(json.loads(answer.text))  # the client itself checks nothing
        assert chat.choices[0].message.content == chat_text(6)
        assert (chat.id, chat.choices[0].finish_reason, chat.service_tier, chat.model) == ("c1", "length", "default", MODEL)
        assert chat.usage is not None
        assert (chat.usage.completion_tokens, chat.usage.total_tokens) == (6, chat.usage.prompt_tokens + 6)
        assert answer.headers["x-request-id"] == "c1"
        assert float(answer.headers["x-qlm-estimated-wait-seconds"]) >= 0.0

        chunks = [
            ChatCompletionChunk.model_validate(chunk.model_dump()) async for chunk in await client.chat.completions.create(**CHAT, **USAGE)
        ]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == chat_text(6)
        assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]
        assert chunks[-1].choices == []
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].usage == chat.usage
        assert {chunk.created for chunk in chunks} == {chunks[0].created}
        without = [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]
        assert all(chunk.usage is None and chunk.choices for chunk in without)


async def test_the_sync_client_is_served_alike(rig: Rig) -> None:
    rig.serve()
    url = (await http_gateway(rig)).gateway.http_url

    def calls() -> tuple[str | None, str, list[str]]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            chat = client.chat.completions.create(**CHAT)
            parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**CHAT, stream=True)]
            return chat.choices[0].message.content, "".join(parts), [model.id for model in client.models.list()]

    assert await asyncio.to_thread(calls) == (chat_text(6), chat_text(6), [MODEL])


async def test_completions_take_texts_and_token_ids_and_count_a_prompt_once(rig: Rig) -> None:
    rig.serve()
    async with opened(rig) as (client, _):
        one = Completion.model_validate((await client.completions.create(model=MODEL, prompt=[5, 6, 7])).model_dump())
        assert one.choices[0].text == text_of(expected_tokens([5, 6, 7], 16))  # max_tokens of the API
        many = await client.completions.create(model=MODEL, prompt=["a", "bb"], n=2, max_tokens=3, seed=1)
        assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in many.choices] == [text_of(expected_tokens([length], 3)) for length in (1, 1, 2, 2)]
        assert many.usage is not None
        assert (many.usage.prompt_tokens, many.usage.completion_tokens) == (2, 12)
        streamed: dict[int, str] = {}
        async for chunk in await client.completions.create(model=MODEL, prompt=["a", "bb"], max_tokens=3, stream=True):
            streamed[chunk.choices[0].index] = streamed.get(chunk.choices[0].index, "") + chunk.choices[0].text
        assert streamed == {0: text_of(expected_tokens([1], 3)), 1: text_of(expected_tokens([2], 3))}


async def test_logprobs_have_the_form_of_their_route(rig: Rig) -> None:
    rig.serve()
    async with opened(rig) as (client, _):
        chat = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
        tokens = expected_tokens([0], 6)
        logprobs = ChatCompletion.model_validate(chat.model_dump()).choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [(each.token, each.logprob) for each in logprobs.content] == [(f" t{token}", -token / 8) for token in tokens]
        assert [each.token for each in logprobs.content[0].top_logprobs] == [f" t{tokens[0]}", f" t{tokens[0] + 1}"]
        streamed = [
            each.token
            async for chunk in await client.chat.completions.create(**CHAT, logprobs=True, stream=True)
            if chunk.choices[0].logprobs is not None
            for each in chunk.choices[0].logprobs.content or ()
        ]
        assert streamed == [f" t{token}" for token in tokens]

        text = (await client.completions.create(model=MODEL, prompt="a", logprobs=1, max_tokens=3)).choices[0]
        assert text.logprobs is not None
        assert text.logprobs.text_offset is not None
        assert [
            text.text[at:].startswith(token) for at, token in zip(text.logprobs.text_offset, text.logprobs.tokens or (), strict=True)
        ] == [True] * 3


async def test_stop_seed_and_the_like_reach_the_request(rig: Rig) -> None:
    async with opened(rig) as (_, session):
        body = {
            **CHAT, "max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.25, "presence_penalty": 1, "frequency_penalty": -1,
            "seed": 7, "stop": ["end"],
            "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        }  # fmt: skip
        async with session.post("/v1/chat/completions", json=body, headers={"x-qlm-mode": "enqueue"}) as answer:
            assert answer.status == 202
        await rig.agent.start_all()
        ((_, running),) = rig.agent.running.items()
        sampling = running.request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (9, 0.5, 0.25, 7)
        assert (sampling.presence_penalty, sampling.frequency_penalty, list(sampling.stop)) == (1.0, -1.0, ["end"])
        assert [(each.role, each.content) for each in running.request.chat.messages] == [("system", "a\nb")]


# Modes and objectives -------------------------------------------------------------------------------------------------


async def test_enqueue_poll_and_delete(rig: Rig) -> None:
    async with opened(rig) as (_, session):
        async with session.post("/v1/chat/completions", json=CHAT, headers={"x-qlm-mode": "enqueue", "Idempotency-Key": "a/b c"}) as answer:
            accepted = await answer.json()
            assert answer.status == 202
            assert (accepted["id"], accepted["state"], answer.headers["x-request-id"]) == ("a/b c", "accepted", "a/b c")
            location = answer.headers["Location"]
        async with session.post(
            "/v1/chat/completions", json=CHAT, headers={"x-qlm-mode": "enqueue", "Idempotency-Key": "second"}
        ) as answer:
            assert answer.status == 202
        await rig.agent.place()
        async with session.get("/v1/requests/second") as answer:
            placed = await answer.json()
        assert (placed["state"], placed["result"], placed["position"]) == ("placed", None, 1)
        assert placed["estimated_wait_seconds"].keys() == {"p50", "p90"}
        async with session.delete("/v1/requests/second") as answer:
            assert (answer.status, (await answer.json())["state"]) == (200, "cancelled")
        assert await state_of(rig, "second") is RequestState.CANCELLED
        rig.serve()
        await until_state(rig, "a/b c", RequestState.COMPLETED)
        async with session.get(URL(location, encoded=True)) as answer:
            ended = await answer.json()
        assert ended["state"] == "completed"
        result = ChatCompletion.model_validate(ended["result"])
        assert (result.id, result.choices[0].message.content) == ("a/b c", chat_text(6))
        async with session.get("/v1/requests/second") as answer:
            assert (await answer.json())["error"]["code"] == "cancelled"
        async with session.delete("/v1/requests/unknown") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "unknown_request")


async def test_a_resent_key_is_the_same_request_and_another_body_is_refused(rig: Rig) -> None:
    rig.serve()
    async with opened(rig) as (client, _), opened(rig) as (other, _):
        key = {"Idempotency-Key": "same"}
        first = await client.chat.completions.create(**CHAT, extra_headers=key)
        again = await other.chat.completions.create(**CHAT, extra_headers=key)
        assert again.model_dump() == first.model_dump()
        streamed = [chunk async for chunk in await other.chat.completions.create(**CHAT, stream=True, extra_headers=key)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == first.choices[0].message.content
        with pytest.raises(openai.ConflictError) as conflict:
            await client.chat.completions.create(**{**CHAT, "max_tokens": 7}, extra_headers=key)
        assert conflict.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("body", "headers", "slo_class", "tier"),
    [
        ({}, {}, "64s", "default"),
        ({"service_tier": "auto"}, {}, "64s", "default"),
        ({"service_tier": "priority"}, {}, "32s", "priority"),
        ({"service_tier": "flex"}, {}, "1024s", "flex"),
        ({"service_tier": "flex"}, {"x-qlm-slo-seconds": "2", "x-qlm-slo-kind": "first_token"}, "2s", "default"),
        ({}, {"x-qlm-priority": "-3"}, "p-3", "default"),
    ],
)
async def test_objectives(rig: Rig, body: dict[str, str], headers: dict[str, str], slo_class: str, tier: str) -> None:
    async with opened(rig) as (client, _):
        answering = asyncio.create_task(
            client.chat.completions.create(**CHAT, extra_body=body, extra_headers={**headers, "Idempotency-Key": "o"})
        )
        await until_state(rig, "o", RequestState.ACCEPTED)
        found = await rig.queue.find(RequestKey("default", "o"))
        assert isinstance(found, LiveRequest)
        rig.serve()
        assert (await answering).service_tier == tier
        assert class_of(admission_of(found.body)[1]) == slo_class


# Streams --------------------------------------------------------------------------------------------------------------


async def events_of(answer: aiohttp.ClientResponse, count: int | None = None) -> list[tuple[str, str]]:
    """(id, data) of the next events, or of all that come."""
    found: list[tuple[str, str]] = []
    while count is None or len(found) < count:
        block = await block_of(answer)
        if not block:
            break
        if not block.startswith(":"):
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            found.append((fields.get("id", ""), fields["data"]))
    return found


async def block_of(answer: aiohttp.ClientResponse) -> str:
    """The next event or comment; empty at the end."""
    return "" if answer.content.at_eof() else (await answer.content.readuntil(b"\n\n")).decode().strip()


def content_of(events: list[tuple[str, str]]) -> str:
    chunks = [json.loads(data) for name, data in events if name]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


async def test_a_queued_stream_is_kept_alive_with_comments(rig: Rig) -> None:
    async with opened(rig) as (_, session), session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        assert [await block_of(answer) for _ in range(3)] == [": keep-alive"] * 3
        rig.serve()
        events = await events_of(answer)
        assert content_of(events) == chat_text(6)
        assert events[-1] == ("", "[DONE]")


async def test_a_stream_goes_on_at_another_gateway_after_sigkill_with_equal_text(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    body = {**CHAT, "max_tokens": 40, **USAGE}
    async with (
        gateway_process(rig, tmp_path / "one", http=HTTP) as one,
        gateway_process(rig, tmp_path / "two", http=HTTP) as two,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session,
    ):
        seen: list[tuple[str, str]] = []
        async with session.post(f"{one.http_url}/v1/chat/completions", json=body) as answer:
            request_id = answer.headers["x-request-id"]
            await rig.agent.start_all()
            for _ in range(10):
                await rig.agent.step()
            while len(content_of(seen).split()) < 10:
                seen += await events_of(answer, 1)
            one.process.kill()
            with pytest.raises((aiohttp.ClientError, asyncio.IncompleteReadError)):
                await events_of(answer)
        last = seen[-1][0]
        assert last.startswith(f"{request_id}/")
        await rig.agent.step(5)
        async with session.post(f"{two.http_url}/v1/chat/completions", json=body, headers={"Last-Event-ID": last}) as answer:
            assert answer.status == 200
            rig.serve()
            rest = await events_of(answer)
        assert content_of([*seen, *rest]) == chat_text(40)
        assert rest[-1] == ("", "[DONE]")
        assert json.loads(rest[-2][1])["usage"]["completion_tokens"] == 40
        created = {json.loads(data)["created"] for _, data in [*seen, *rest[:-1]]}
        assert len(created) == 1
        # Also after its end, from any event, also the last.
        async with session.post(f"{two.http_url}/v1/chat/completions", json=body, headers={"Last-Event-ID": rest[-3][0]}) as answer:
            assert [data for _, data in await events_of(answer)][-1] == "[DONE]"


async def test_choices_resume_each_at_its_own_token(rig: Rig) -> None:
    rig.serve()
    body = {"model": MODEL, "prompt": ["a", "bb"], "max_tokens": 8, "stream": True}
    async with opened(rig) as (_, session):
        async with session.post("/v1/completions", json=body, headers={"Idempotency-Key": "two"}) as answer:
            created = json.loads((await events_of(answer))[0][1])["created"]
        async with session.post("/v1/completions", json=body, headers={"Last-Event-ID": f"two/{created}/3,8"}) as answer:
            events = await events_of(answer)
        texts = {0: "", 1: ""}
        for _, data in events[:-1]:
            choice = json.loads(data)["choices"][0]
            texts[choice["index"]] += choice["text"]
        assert texts == {0: text_of(expected_tokens([1], 8)[3:]), 1: ""}
        for wrong in ("two/1/3", "two/1/3,-1", "two", "two/x/1,1", "/1/1,1"):
            async with session.post("/v1/completions", json=body, headers={"Last-Event-ID": wrong}) as answer:
                assert (answer.status, (await answer.json())["error"]["param"]) == (400, "Last-Event-ID"), wrong
        async with session.post("/v1/completions", json=body, headers={"Last-Event-ID": "none/1/1,1"}) as answer:
            assert answer.status == 404
        async with session.post("/v1/completions", json=body, headers={"Last-Event-ID": "two/1/9,9"}) as answer:
            assert json.loads((await events_of(answer))[-1][1])["error"]["code"] == "offset_out_of_range"


# Clients that leave ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_client_that_leaves_cancels_only_where_a_setting_says_so(rig: Rig, cancels: bool) -> None:
    async with opened(rig, cancel_on_disconnect=cancels) as (client, _):
        calling = asyncio.create_task(client.chat.completions.create(**CHAT, extra_headers={"Idempotency-Key": "left"}))
        await until_state(rig, "left", RequestState.ACCEPTED)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        if cancels:
            await until_state(rig, "left", RequestState.CANCELLED)
        rig.serve()
        await until_state(rig, "left", RequestState.CANCELLED if cancels else RequestState.COMPLETED)


async def test_a_stream_that_is_left_goes_on_and_its_reader_is_let_go(rig: Rig) -> None:
    gateway = await http_gateway(rig, cancel_on_disconnect=True)
    async with aiohttp.ClientSession(gateway.gateway.http_url) as session:
        async with session.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"Idempotency-Key": "left"}) as answer:
            await block_of(answer)
            answer.close()
        readers = gateway.gateway.metrics.open_readers
        await until(lambda: readers._value.get() == 0, "the reader is let go")
        rig.serve()
        await until_state(rig, "left", RequestState.COMPLETED)


# Errors ---------------------------------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
ERRORS: list[tuple[dict[str, Any], dict[str, str], int, str | None, str]] = [
    ({"model": "none"}, {}, 404, "model", "model_not_found"),
    ({"model": None}, {}, 400, "model", "invalid_field"),
    ({"messages": []}, {}, 400, "messages", "empty_prompt"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, {}, 400, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "robot", "content": "x"}]}, {}, 400, "messages", "invalid_field"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, {}, 400, "messages[0].content[0].type", "invalid_field"),
    ({"temperature": 3}, {}, 400, "temperature", "invalid_field"),
    ({"temperature": "1"}, {}, 400, "temperature", "invalid_field"),
    ({"max_tokens": 0}, {}, 400, "max_tokens", "invalid_field"),
    ({"n": 17}, {}, 400, "n", "invalid_field"),
    ({"stop": ["a"] * 17}, {}, 400, "stop", "invalid_field"),
    ({"seed": 1 << 63}, {}, 400, "seed", "invalid_field"),
    ({"top_logprobs": 1}, {}, 400, "top_logprobs", "invalid_field"),
    ({"logprobs": True, "top_logprobs": 21}, {}, 400, "logprobs", "invalid_field"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, {}, 400, "tools", "invalid_field"),
    ({"logit_bias": {"1": 5}}, {}, 400, "logit_bias", "invalid_field"),
    ({"stream_options": {"include_usage": True}}, {}, 400, "stream_options", "invalid_field"),
    ({"service_tier": "scale"}, {}, 400, "service_tier", "invalid_field"),
    ({"response_format": {"type": "json_schema"}}, {}, 400, "response_format.json_schema", "invalid_field"),
    ({}, {"x-qlm-slo-seconds": "soon"}, 400, "x-qlm-slo-seconds", "invalid_field"),
    ({}, {"x-qlm-slo-seconds": "nan"}, 400, "x-qlm-slo-seconds", "invalid_field"),
    ({}, {"x-qlm-slo-seconds": "1", "x-qlm-priority": "1"}, 400, "x-qlm-priority", "invalid_field"),
    ({}, {"x-qlm-slo-kind": "last_token", "x-qlm-slo-seconds": "1"}, 400, "x-qlm-slo-kind", "invalid_field"),
    ({}, {"x-qlm-priority": "1001"}, 400, "x-qlm-priority", "invalid_field"),
    ({}, {"x-qlm-mode": "later"}, 400, "x-qlm-mode", "invalid_field"),
    ({"stream": True}, {"x-qlm-mode": "enqueue"}, 400, "stream", "invalid_field"),
    ({"n": 2}, {"x-qlm-mode": "enqueue"}, 400, "n", "invalid_field"),
    ({}, {"Idempotency-Key": "x" * 129}, 400, "Idempotency-Key", "invalid_field"),
    ({}, {"Content-Type": "text/plain"}, 415, None, "unsupported_media_type"),
    ({}, {"Host": "evil.example"}, 403, None, "wrong_host"),
]  # fmt: skip


async def test_every_refusal_has_the_error_body_of_the_api_and_accepts_nothing(rig: Rig) -> None:
    async with opened(rig, body_bytes_max=200_000) as (_, session):
        for body, headers, status, param, code in ERRORS:
            data = json.dumps({**CHAT, **body})
            async with session.post("/v1/chat/completions", data=data, headers={"Content-Type": "application/json", **headers}) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["param"], error["code"]) == (status, param, code), (body, headers, error)
            assert error["type"] == "invalid_request_error"
            assert "sampling." not in error["message"]
        for raw, status, code in (
            (b"{", 400, "invalid_field"),
            (b"x" * 200_001, 413, "request_entity_too_large"),
            (b"", 400, "invalid_field"),
        ):
            async with session.post("/v1/completions", data=raw, headers={"Content-Type": "application/json"}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)
        for method, path, status in (("GET", "/v1/none", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/none", 404)):
            async with session.request(method, path) as answer:
                assert (answer.status, (await answer.json())["error"]["type"]) == (status, "invalid_request_error")
    assert not (await rig.queue.live_requests("", 10)).requests


async def test_unknown_fields_are_ignored_or_refused_by_a_setting(rig: Rig) -> None:
    rig.serve()
    async with opened(rig) as (client, _), opened(rig, unknown_fields="refuse") as (strict, _):
        extra = {"tools": [], "tool_choice": "auto", "user": "u"}
        for each in (client, strict):
            assert (await each.chat.completions.create(**CHAT, extra_body=extra)).choices
        assert (await client.chat.completions.create(**CHAT, extra_body={"store": True})).choices
        with pytest.raises(openai.BadRequestError) as refused:
            await strict.chat.completions.create(**CHAT, extra_body={"store": True})
        assert refused.value.param == "store"


async def test_a_full_queue_is_429_with_the_hint_and_takes_no_half_of_a_call(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Bounds(queue_max=1)) as rig, opened(rig) as (client, _):
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(**CHAT, n=2)
        headers = refused.value.response.headers
        assert (refused.value.code, refused.value.type) == ("queue_full", "rate_limit_error")
        assert int(headers["Retry-After"]) >= 1
        assert 100 <= int(headers["retry-after-ms"]) <= 1000 * int(headers["Retry-After"])
        assert not (await rig.queue.live_requests("", 10)).requests


async def test_limits_of_streams_and_calls_are_503(rig: Rig) -> None:
    gateway = await rig.gateway(http={**HTTP, "calls_max": 2}, streams_max=1)
    async with aiohttp.ClientSession(gateway.gateway.http_url) as session:
        stream = {**CHAT, "stream": True}
        async with session.post("/v1/chat/completions", json=stream) as first:
            await block_of(first)
            async with session.post("/v1/chat/completions", json=stream) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (503, "streams_full")
                assert answer.headers["retry-after-ms"] == "500"
            # A body that is on its way is a call too.
            parts = asyncio.Event()

            async def slowly() -> AsyncIterator[bytes]:
                yield b"{"
                await parts.wait()

            slow = asyncio.create_task(
                session.post("/v1/chat/completions", data=slowly(), headers={"Content-Type": "application/json"}).__aenter__()
            )
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with session.get("/health") as answer:
                        if answer.status == 503:
                            assert (await answer.json())["error"]["code"] == "calls_full"
                            break
            parts.set()
            (await slow).close()


async def test_a_body_that_does_not_arrive_is_408(rig: Rig) -> None:
    async with opened(rig, body_timeout_s=0.05) as (_, session):

        async def never() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(PATIENCE_S)

        async with session.post("/v1/completions", data=never(), headers={"Content-Type": "application/json"}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (408, "body_timeout")


async def test_a_request_that_ends_otherwise_is_an_error_of_its_reason(rig: Rig) -> None:
    async with opened(rig) as (client, session):
        calling = asyncio.create_task(client.chat.completions.create(**CHAT, extra_headers={"Idempotency-Key": "e1"}))
        await until_state(rig, "e1", RequestState.ACCEPTED)
        stream = await client.chat.completions.create(**CHAT, stream=True, extra_headers={"Idempotency-Key": "e2"})
        for request_id in ("e1", "e2"):
            async with session.delete(f"/v1/requests/{request_id}") as answer:
                assert answer.status == 200
        with pytest.raises(openai.ConflictError) as ended:
            await calling
        assert (ended.value.code, ended.value.response.headers["x-should-retry"]) == ("cancelled", "false")
        with pytest.raises(openai.APIError) as broken:
            async for _ in stream:
                pass
        assert broken.value.code == "cancelled"


async def test_a_gateway_that_stops_says_so_and_the_stream_goes_on_elsewhere(rig: Rig) -> None:
    one = await http_gateway(rig)
    async with opened(rig) as (_, other), aiohttp.ClientSession(one.gateway.http_url) as session:
        async with session.get("/readiness") as answer:
            assert answer.status == 200
        async with session.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"Idempotency-Key": "d"}) as answer:
            await block_of(answer)
            one.start_drain()
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    async with session.get("/readiness") as ready:
                        if ready.status == 503:
                            break
            async with session.post("/v1/chat/completions", json=CHAT) as refused:
                assert (refused.status, (await refused.json())["error"]["code"]) == (503, "draining")
                assert refused.headers["retry-after-ms"] == "100"
            async with session.get("/health") as alive:
                assert alive.status == 200
            assert json.loads((await events_of(answer))[-1][1])["error"]["code"] == "draining"
        rig.serve()
        async with other.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"Idempotency-Key": "d"}) as answer:
            assert content_of(await events_of(answer)) == chat_text(6)


# Hostile clients ------------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=20)
FIELDS = ("messages", "prompt", "max_tokens", "n", "stop", "seed", "stream", "temperature", "logprobs", "service_tier", "user", "tools")
BODIES = st.dictionaries(
    st.sampled_from(FIELDS), SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=3), max_size=4
)


async def test_hostile_calls_are_answered_or_refused_and_the_gateway_serves_on(rig: Rig) -> None:
    rig.serve(0.0)
    gateway = await rig.gateway(http=HTTP, context_tokens_max=64)
    host = gateway.gateway.http_url.removeprefix("http://")

    def answered(method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    @settings(max_examples=150, deadline=None)
    @given(st.sampled_from(["/v1/chat/completions", "/v1/completions"]), BODIES)
    def hammer(path: str, fields: dict[str, object]) -> None:
        status, answer = answered("POST", path, json.dumps({**CHAT, "prompt": "x", **fields}).encode(), {})
        assert status in (200, 400), answer
        if status == 400:
            assert json.loads(answer)["error"]["type"] == "invalid_request_error"

    @settings(max_examples=100, deadline=None)
    @given(st.sampled_from(["GET", "DELETE"]), st.text(min_size=1, max_size=200))
    def name(method: str, request_id: str) -> None:
        status, answer = answered(method, f"/v1/requests/{quote(request_id, safe='', errors='ignore')}", b"", {})
        assert status in (400, 404, 405), answer
        json.loads(answer)

    await asyncio.to_thread(hammer)
    await asyncio.to_thread(name)
    # What is no HTTP, or too long, is refused by the library, whose answers have no body of the API.
    for raw in (b"\x16\x03\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: " + b"a" * 10_000 + b"\r\n\r\n"):
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(raw)
        assert b" 400 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
        writer.close()
    async with client_of(gateway.gateway.http_url) as client:
        assert (await client.chat.completions.create(**CHAT)).choices[0].message.content == chat_text(6)
