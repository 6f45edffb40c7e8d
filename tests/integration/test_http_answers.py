"""The OpenAI API over HTTP on a real queue, with the official client: answers, modes and objectives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from yarl import URL

from qlm_core.vocabulary.group import slo_class as class_of
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_gateway.wire import admission_of
from qlm_queue.values import LiveRequest

from .gateway_rig import MODEL, PATIENCE_S, Rig, expected_tokens
from .http_rig import (
    CHAT,
    USAGE,
    chat_text,
    events_of,
    opened,
    state_of,
    text_of,
    until_state,
)


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
        rig.publish()
        placed: dict[str, Any] = {"estimated_wait_seconds": None}
        async with asyncio.timeout(PATIENCE_S):
            while placed["estimated_wait_seconds"] is None:
                async with session.get("/v1/requests/second") as answer:
                    placed = await answer.json()
        assert (placed["state"], placed["result"], placed["position"]) == ("placed", None, 1)
        assert placed["estimated_wait_seconds"].keys() == {"p50", "p90"}
        async with session.post("/v1/chat/completions", json=CHAT, headers={"x-qlm-mode": "enqueue"}) as answer:
            queued = await answer.json()
            assert float(answer.headers["x-qlm-estimated-wait-seconds"]) == queued["estimated_wait_seconds"]["p50"]
            assert int(answer.headers["x-qlm-position"]) == queued["position"] >= 1
        async with session.delete("/v1/requests/second") as answer:
            assert (answer.status, await answer.json()) == (
                200,
                {"id": "second", "object": "qlm.request", "state": "cancelled", "deleted": True},
            )
        assert await state_of(rig, "second") is None
        rig.serve()
        await until_state(rig, "a/b c", RequestState.COMPLETED)
        async with session.get(URL(location, encoded=True)) as answer:
            ended = await answer.json()
        assert ended["state"] == "completed"
        result = ChatCompletion.model_validate(ended["result"])
        assert (result.id, result.choices[0].message.content) == ("a/b c", chat_text(6))
        async with session.delete(URL(location, encoded=True)) as answer:
            assert (answer.status, (await answer.json())["state"]) == (200, "completed")
        # An erased request is answered as one that never was.
        found = set()
        for method, name in (("GET", "second"), ("DELETE", "second"), ("GET", "a%2Fb%20c"), ("DELETE", "a%2Fb%20c"), ("DELETE", "unknown")):
            async with session.request(method, URL(f"/v1/requests/{name}", encoded=True)) as answer:
                found.add((answer.status, await answer.text()))
        ((status, text),) = found
        assert (status, json.loads(text)["error"]["code"]) == (404, "unknown_request")


async def test_a_stream_whose_request_is_deleted_ends_with_an_error(rig: Rig) -> None:
    async with opened(rig) as (_, session):
        key = {"Idempotency-Key": "gone"}
        async with session.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=key) as answer:
            await rig.agent.start_all()
            await rig.agent.step(2)
            await events_of(answer, 2)
            async with session.delete("/v1/requests/gone") as deleted:
                assert (await deleted.json())["state"] == "cancelled"
            assert json.loads((await events_of(answer))[-1][1])["error"]["code"] == "cancelled"
        # The id is free, also for another body.
        rig.serve()
        async with session.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3}, headers=key) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"] == chat_text(3)


async def test_the_official_client_is_answered_before_it_gives_up(rig: Rig) -> None:
    """A request that takes longer continues: its id is in the answer, and the client does not send another one."""
    async with opened(rig) as (client, session):
        with pytest.raises(openai.InternalServerError) as raised:
            await client.with_options(timeout=3.0, max_retries=2).chat.completions.create(**CHAT)
        request_id = raised.value.response.headers["x-request-id"]
        assert (raised.value.status_code, raised.value.code) == (504, "still_waiting")
        assert f"GET /v1/requests/{request_id}" in raised.value.message
        assert [each.key.request_id for each in (await rig.queue.live_requests("", 10)).requests] == [request_id]
        rig.serve()
        await until_state(rig, request_id, RequestState.COMPLETED)
        async with session.get(f"/v1/requests/{request_id}") as answer:
            assert (await answer.json())["result"]["choices"][0]["message"]["content"] == chat_text(6)


async def test_a_client_that_would_give_up_counts_as_one_that_left(rig: Rig) -> None:
    async with opened(rig, cancel_on_disconnect=True) as (client, _):
        headers = {"x-stainless-read-timeout": "0.3", "Idempotency-Key": "left"}
        with pytest.raises(openai.InternalServerError, match="it is cancelled"):
            await client.chat.completions.create(**CHAT, n=2, extra_headers=headers)
        assert [await state_of(rig, name) for name in ("left", "left.1")] == [RequestState.CANCELLED] * 2


async def test_a_ttl_of_llm_d_expires_the_request(rig: Rig) -> None:
    async with opened(rig) as (client, _):
        headers = {"x-llm-d-inference-ttl": "300ms", "Idempotency-Key": "short"}
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(**CHAT, extra_headers=headers)
        assert (raised.value.status_code, raised.value.code) == (504, "expired")


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
        ({}, {"x-llm-d-slo-ttft-ms": "1500"}, "2s", "default"),
        ({"max_tokens": 5, "priority": 1}, {"x-llm-d-slo-ttft-ms": "1500", "x-llm-d-slo-tpot-ms": "500"}, "4s", "default"),
        ({"priority": 7}, {"x-llm-d-inference-objective": "premium"}, "p-10", "default"),
        ({"priority": 7}, {"x-llm-d-inference-objective": "premium", "x-llm-d-slo-ttft-ms": "1500"}, "2s", "default"),
        ({}, {"x-llm-d-inference-objective": "batch", "x-llm-d-inference-fairness-id": "acme"}, "p1", "default"),
        ({"service_tier": "flex"}, {"x-llm-d-inference-objective": "standard"}, "1024s", "flex"),
        ({}, {"x-llm-d-inference-objective": "unknown"}, "64s", "default"),
        ({"priority": 7, "service_tier": "flex"}, {}, "p7", "default"),
        ({"priority": 7}, {"x-qlm-slo-seconds": "9"}, "16s", "default"),
    ],
)
async def test_objectives(rig: Rig, body: dict[str, object], headers: dict[str, str], slo_class: str, tier: str) -> None:
    async with opened(rig, objectives={"premium": 10, "standard": 0, "batch": -1}) as (client, _):
        answering = asyncio.create_task(
            client.chat.completions.create(**CHAT, extra_body=body, extra_headers={**headers, "Idempotency-Key": "o"})
        )
        await until_state(rig, "o", RequestState.ACCEPTED)
        found = await rig.queue.find(RequestKey("default", "o"))
        assert isinstance(found, LiveRequest)
        rig.serve()
        assert (await answering).service_tier == tier
        assert class_of(admission_of(found.body)[1]) == slo_class


async def test_a_named_tool_is_called_with_the_answer(rig: Rig) -> None:
    rig.serve()
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tool_call: Any = {**CHAT, "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    async with opened(rig) as (client, session):
        message = (await client.chat.completions.create(**tool_call)).model_dump()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": chat_text(6)})
        assert message["content"] is None
        streamed = [chunk async for chunk in await client.chat.completions.create(**tool_call, stream=True)]
        deltas = [
            each for chunk in streamed for each in ChatCompletionChunk.model_validate(chunk.model_dump()).choices[0].delta.tool_calls or ()
        ]
        assert [each.function.name for each in deltas if each.id and each.function] == ["f"]
        assert "".join(each.function.arguments or "" for each in deltas if each.function) == chat_text(6)
        async with session.post("/v1/chat/completions", json={**CHAT, "tools": [tool]}) as refused:
            assert (refused.status, (await refused.json())["error"]["param"]) == (400, "tools"), "a model without a chat template"
