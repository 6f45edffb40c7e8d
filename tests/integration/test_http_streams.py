"""Streams over HTTP: comments while they wait, resumed by event id at any gateway, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from qlm_core.vocabulary.request import RequestState

from .gateway_process import gateway_process
from .gateway_rig import MODEL, PATIENCE_S, Rig, expected_tokens, until
from .http_rig import (
    CHAT,
    HTTP,
    USAGE,
    chat_text,
    comment_of,
    content_of,
    events_of,
    http_gateway,
    opened,
    text_of,
    until_state,
)


async def test_a_queued_stream_is_kept_alive_with_comments(rig: Rig) -> None:
    async with opened(rig) as (_, session), session.post("/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        assert [await comment_of(answer) for _ in range(3)] == [": keep-alive\n"] * 3
        rig.serve()
        events = await events_of(answer)
        assert content_of(events) == chat_text(6)
        assert events[-1] == ("", "[DONE]")


async def test_a_client_that_gives_up_soon_hears_a_comment_sooner(rig: Rig) -> None:
    body, headers = {**CHAT, "stream": True}, {"x-stainless-read-timeout": "2"}
    async with (
        opened(rig, keep_alive_s=PATIENCE_S) as (_, session),
        session.post("/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        async with asyncio.timeout(PATIENCE_S / 2):
            assert await comment_of(answer) == ": keep-alive\n"


async def test_comments_hold_the_position_where_a_header_requests_it(rig: Rig) -> None:
    body, headers = {**CHAT, "stream": True}, {"x-qlm-keep-alive": "position"}
    async with opened(rig, keep_alive_s=1.0) as (client, session), session.post("/v1/chat/completions", json=body) as first:
        await comment_of(first)
        async with session.post("/v1/chat/completions", json=body, headers=headers) as answer:
            await rig.agent.place()
            rig.publish()
            async with asyncio.timeout(PATIENCE_S):
                while not (line := await comment_of(answer)).startswith(": {"):
                    pass
                waits = json.loads(line[2:])
                while waits["state"] != "placed" or waits["estimated_wait_seconds"] is None:
                    line = await comment_of(answer)
                    waits = json.loads(line[2:]) if line.startswith(": {") else waits
            assert (waits["index"], waits["position"]) == (0, 1)
            assert waits["estimated_wait_seconds"].keys() == {"p50", "p90"}
        stream = await client.chat.completions.create(**CHAT, stream=True, extra_headers=headers)
        rig.serve()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == chat_text(6)


async def test_comments_between_events_do_not_disturb_the_official_client(rig: Rig) -> None:
    async with opened(rig) as (client, session):
        key = {"Idempotency-Key": "paced"}
        stream = await client.chat.completions.create(**CHAT, stream=True, extra_headers=key)
        async with session.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=key) as answer:
            await rig.agent.start_all()
            for token in range(3):
                await rig.agent.step()
                await events_of(answer, 1 if token else 2)
                while await comment_of(answer) != ": keep-alive\n":
                    pass
            rig.serve()
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == chat_text(6)


async def test_a_stream_continues_at_another_gateway_after_sigkill_with_equal_text(rig: Rig, tmp_path: Path) -> None:
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


async def test_a_stream_that_is_left_continues_and_its_reader_is_released(rig: Rig) -> None:
    gateway = await http_gateway(rig, cancel_on_disconnect=True)
    async with aiohttp.ClientSession(gateway.gateway.http_url) as session:
        async with session.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"Idempotency-Key": "left"}) as answer:
            await comment_of(answer)
            answer.close()
        readers = gateway.gateway.metrics.open_readers
        await until(lambda: readers._value.get() == 0, "the reader is let go")
        rig.serve()
        await until_state(rig, "left", RequestState.COMPLETED)
