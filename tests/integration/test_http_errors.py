"""Errors of the HTTP front: every refusal in the form of the API, limits, and hostile clients."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_core.vocabulary.request import RequestState
from qlm_queue.values import Bounds

from .gateway_rig import PATIENCE_S, Rig, open_rig
from .http_rig import (
    CHAT,
    HTTP,
    chat_text,
    client_of,
    comment_of,
    content_of,
    events_of,
    http_gateway,
    opened,
    until_state,
)

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
    ({}, {"x-llm-d-slo-ttft-ms": "soon"}, 400, "x-llm-d-slo-ttft-ms", "invalid_field"),
    ({"max_tokens": 9}, {"x-llm-d-slo-ttft-ms": "9", "x-llm-d-slo-tpot-ms": ""}, 400, "x-llm-d-slo-tpot-ms", "invalid_field"),
    ({}, {"x-llm-d-inference-ttl": "5"}, 400, "x-llm-d-inference-ttl", "invalid_field"),
    ({}, {"x-llm-d-inference-ttl": "9000h"}, 400, "x-llm-d-inference-ttl", "invalid_field"),
    ({}, {"x-qlm-keep-alive": "often"}, 400, "x-qlm-keep-alive", "invalid_field"),
    ({"priority": 1001}, {}, 400, "priority", "invalid_field"),
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
            await comment_of(first)
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


async def test_a_gateway_that_stops_says_so_and_the_stream_continues_elsewhere(rig: Rig) -> None:
    one = await http_gateway(rig)
    async with opened(rig) as (_, other), aiohttp.ClientSession(one.gateway.http_url) as session:
        async with session.get("/readiness") as answer:
            assert answer.status == 200
        async with session.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"Idempotency-Key": "d"}) as answer:
            await comment_of(answer)
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

    @settings(max_examples=150)
    @given(st.sampled_from(["/v1/chat/completions", "/v1/completions"]), BODIES)
    def hammer(path: str, fields: dict[str, object]) -> None:
        status, answer = answered("POST", path, json.dumps({**CHAT, "prompt": "x", **fields}).encode(), {})
        assert status in (200, 400), answer
        if status == 400:
            assert json.loads(answer)["error"]["type"] == "invalid_request_error"

    @settings(max_examples=100)
    @given(st.sampled_from(["GET", "DELETE"]), st.text(min_size=1, max_size=200))
    def name(method: str, request_id: str) -> None:
        status, answer = answered(method, f"/v1/requests/{quote(request_id, safe='', errors='ignore')}", b"", {})
        assert status in (400, 404, 405), answer
        json.loads(answer)

    await asyncio.to_thread(hammer)
    await asyncio.to_thread(name)
    # A message that is no HTTP, or too long, is refused by the library, whose answers have no body of the API.
    for raw in (b"\x16\x03\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: " + b"a" * 10_000 + b"\r\n\r\n"):
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(raw)
        assert b" 400 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
        writer.close()
    async with client_of(gateway.gateway.http_url) as client:
        assert (await client.chat.completions.create(**CHAT)).choices[0].message.content == chat_text(6)
