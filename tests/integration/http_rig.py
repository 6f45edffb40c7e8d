"""Gateways that serve HTTP, the official client, and events read by hand: what the tests of the HTTP front share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai

from qlm.errors import NotFound
from qlm_core.vocabulary.request import RequestKey, RequestState

from .gateway_rig import MODEL, PATIENCE_S, GatewayRun, Rig, expected_tokens

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


async def events_of(answer: aiohttp.ClientResponse, count: int | None = None) -> list[tuple[str, str]]:
    """(id, data) of the next events, or of all that arrive."""
    found: list[tuple[str, str]] = []
    while (count is None or len(found) < count) and (block := (await answer.content.readuntil(b"\n\n")).decode()):
        fields = dict(line.split(": ", 1) for line in block.strip().split("\n") if not line.startswith(":"))
        found.append((fields.get("id", ""), fields["data"]))
    return found


async def comment_of(answer: aiohttp.ClientResponse) -> str:
    """The next line of a stream that is silent."""
    return (await answer.content.readline()).decode()


def content_of(events: list[tuple[str, str]]) -> str:
    chunks = [json.loads(data) for name, data in events if name]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
