"""The Responses API on a real queue, with the official client and the types of its package."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_gateway.front.http.responses_api.documents import of_completion
from qlm_queue.values import LiveRequest

from .gateway_rig import MODEL, Rig
from .http_rig import chat_text, opened, until_state

ASK: dict[str, Any] = {"model": MODEL, "input": "Why?", "max_output_tokens": 6}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def checked(response: Response) -> Response:
    """By all rules of the package: the client itself checks nothing."""
    return Response.model_validate(response.model_dump(), strict=True)


async def test_a_response_is_a_chat_with_other_names(rig: Rig) -> None:
    rig.serve()
    async with opened(rig) as (client, _):
        made = checked(await client.responses.create(**ASK, instructions="Be short.", temperature=0.5, metadata={"a": "b"}))
        assert made.output_text == chat_text(6)
        assert (made.status, made.instructions, made.temperature, made.metadata) == ("incomplete", "Be short.", 0.5, {"a": "b"})
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        assert made.usage is not None
        assert (made.usage.output_tokens, made.usage.total_tokens) == (6, made.usage.input_tokens + 6)
        items: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Why not?"}]},
            {"role": "user", "content": "So?"},
        ]
        assert checked(await client.responses.create(**{**ASK, "input": items})).output_text == chat_text(6)
        assert checked(await client.responses.retrieve(made.id)).output_text == chat_text(6)


async def test_a_stream_has_the_typed_events_in_order(rig: Rig) -> None:
    rig.serve()
    async with opened(rig) as (client, session):
        events = [event async for event in await client.responses.create(**ASK, stream=True)]
        for event in events:
            EVENT.validate_python(event.model_dump(), strict=True)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[4 : 4 + len(deltas)] == ["output_text.delta"] * len(deltas)
        assert kinds[4 + len(deltas) :] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
        assert "".join(deltas) == chat_text(6)
        async with client.responses.stream(**ASK) as stream:  # it keeps a snapshot, and fails where events do not fit it
            texts = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        assert texts[-1] == chat_text(6)
        async with session.post("/v1/responses", json={**ASK, "stream": True}) as answer:
            assert (await answer.content.readline()) == b"event: response.created\n"


async def test_a_background_response_is_enqueued_and_read_by_its_id(rig: Rig) -> None:
    async with opened(rig) as (client, _):
        made = checked(await client.responses.create(**ASK, background=True, extra_headers={"Idempotency-Key": "bg"}))
        assert (made.id, made.status, made.output) == ("bg", "queued", [])
        live = await rig.queue.find(RequestKey("default", "bg"))
        assert isinstance(live, LiveRequest)
        assert live.gateway == "", "nobody follows its tokens"
        assert checked(await client.responses.retrieve("bg")).status == "queued"
        await client.responses.create(**ASK, background=True, extra_headers={"Idempotency-Key": "unwanted"})
        assert checked(await client.responses.cancel("unwanted")).status == "cancelled"
        await client.responses.delete("unwanted")
        for gone in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await gone("unwanted")
        await rig.agent.start_all()
        assert checked(await client.responses.retrieve("bg")).status == "in_progress"
        rig.serve()
        await until_state(rig, "bg", RequestState.COMPLETED)
        assert checked(await client.responses.retrieve("bg")).output_text == chat_text(6)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tools", [{"type": "function", "name": "f"}], "tools"),
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("text", {"format": {"type": "json_object"}}, "text"),
        ("n", 2, "n"),
        ("input", [{"type": "function_call_output", "call_id": "c", "output": "o"}], "input[0].type"),
        ("input", "", "input"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("temperature", 9.0, "temperature"),
        ("background", True, "background"),
    ],
)
async def test_fields_that_a_chat_lacks_are_refused_by_name(rig: Rig, field: str, value: object, param: str) -> None:
    async with opened(rig) as (client, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**ASK, extra_body={field: value, "stream": field == "background"})
        assert refused.value.param == param
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("nobody")


async def test_a_stream_that_fails_says_so(rig: Rig) -> None:
    async with opened(rig) as (client, session):
        stream = await client.responses.create(**ASK, stream=True, extra_headers={"Idempotency-Key": "gone"})
        await session.delete("/v1/requests/gone")
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        EVENT.validate_python(last.model_dump(), strict=True)
        assert last.response.error is not None
        assert "cancelled" in last.response.error.message


def test_an_answer_that_ends_by_itself_is_completed() -> None:
    choice = {"message": {"content": "Because."}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    chat = {"id": "r", "created": 1, "model": "m", "service_tier": "flex", "choices": [choice], "usage": usage}
    made = Response.model_validate(of_completion(chat, None))
    assert (made.status, made.output_text, made.service_tier) == ("completed", "Because.", "flex")
    assert made.incomplete_details is None
