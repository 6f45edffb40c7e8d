"""Thousands of open streams on one gateway: all are served, each exactly, and a stream costs little."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest

import qlm
from qlm.api.v1.gateway_pb2 import GenerateRequest
from qlm.api.v1.gateway_pb2_grpc import GatewayStub
from qlm.api.v1.request_pb2 import Request, SamplingParams, TokenPrompt

from .gateway_process import gateway_process
from .gateway_rig import MODEL, PATIENCE_S, Rig, expected_tokens, open_rig, until

STREAMS = 2_000
CHANNELS = 8
OUTPUT_TOKENS = 6
STREAM_BYTES_MAX = 64 << 10
"""Memory a stream; measured 28 KB, most of it grpc's."""


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as opened:
        yield opened


async def test_thousands_of_streams_on_one_gateway(rig: Rig, tmp_path: Path) -> None:
    accepted = 0

    async def follow(channel: grpc.aio.Channel, number: int) -> list[int]:
        nonlocal accepted
        request = Request(model=MODEL, tokens=TokenPrompt(ids=[number]), sampling=SamplingParams(max_tokens=OUTPUT_TOKENS))
        tokens: list[int] = []
        async for response in GatewayStub(channel).Generate(GenerateRequest(request=request), timeout=4 * PATIENCE_S):
            accepted += response.HasField("accepted")
            tokens.extend(response.tokens.token_ids)
        return tokens

    async with gateway_process(rig, tmp_path) as gateway, AsyncExitStack() as opened:
        before = gateway.resident_bytes
        # Channels with the same options would share one connection.
        options = [(("qlm.test.channel", number),) for number in range(CHANNELS)]
        channels = [await opened.enter_async_context(grpc.aio.insecure_channel(gateway.address, options=each)) for each in options]
        tasks = [asyncio.create_task(follow(channels[number % CHANNELS], number)) for number in range(STREAMS)]
        while len(rig.agent.running) < STREAMS:
            await rig.agent.start_all()
        await until(lambda: accepted == STREAMS, "everybody knows that its request is accepted")
        assert (gateway.resident_bytes - before) / STREAMS < STREAM_BYTES_MAX
        assert await gateway.metric("qlm_gateway_open_readers") == STREAMS
        for _ in range(OUTPUT_TOKENS - 1):
            await rig.agent.step()
        # Others start and end while they are open.
        async with qlm.AsyncClient(gateway.address) as client:
            newcomer = client.generate(MODEL, [7, 7], max_tokens=OUTPUT_TOKENS)
            await newcomer.wait_accepted()
            rig.serve()
            assert [token async for chunk in newcomer for token in chunk.token_ids] == expected_tokens([7, 7], OUTPUT_TOKENS)
        answers = await asyncio.gather(*tasks)
        assert answers == [expected_tokens([number], OUTPUT_TOKENS) for number in range(STREAMS)]
        # The gateway counts a message out when its write returns, which may be after the client has read it.
        async with asyncio.timeout(PATIENCE_S):
            while await gateway.metric("qlm_gateway_buffered_tokens"):
                await asyncio.sleep(0.05)
