"""Readers that do not read: what the gateway keeps for them is bounded, nobody waits for them, and they lose nothing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest
from prometheus_client import generate_latest

import qlm
from qlm.api.v1.gateway_pb2 import GenerateRequest, StreamResponse
from qlm.api.v1.gateway_pb2_grpc import GatewayStub
from qlm.api.v1.request_pb2 import Request, SamplingParams, TokenPrompt
from qlm.errors import GatewayFull
from qlm.wire_errors import from_rpc_error
from qlm_gateway.streams.readers import PIECE_TOKENS

from .gateway_process import gateway_process
from .gateway_rig import MODEL, PATIENCE_S, GatewayRun, Rig, concatenated, expected_tokens, open_rig, until

PROMPT = [5, 6, 7]
CONTEXT_TOKENS_MAX = 100_000
NARROW = (
    # The least that HTTP/2 lets a client announce, and no growth: a stream that is not read stops its writer after some hundred tokens.
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
STEP_TOKENS = 100
BUFFER_TOKENS_MAX = 500
BUFFERS_TOKENS_MAX = 2_000


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as opened:
        yield opened


class Stalled:
    """A raw call that reads nothing until a test makes it."""

    def __init__(self, channel: grpc.aio.Channel, prompt: list[int], tokens: int) -> None:
        request = Request(model=MODEL, tokens=TokenPrompt(ids=prompt), sampling=SamplingParams(max_tokens=tokens))
        self.call = GatewayStub(channel).Generate(GenerateRequest(request=request), timeout=4 * PATIENCE_S)
        self.expected = expected_tokens(prompt, tokens)
        self.read_tokens: list[int] = []
        self.ended = False

    async def read(self) -> bool:
        """One message; False at the end of the stream."""
        response = await self.call.read()
        if not isinstance(response, StreamResponse):
            return False
        if response.HasField("tokens"):
            assert response.tokens.offset == len(self.read_tokens)
            self.read_tokens.extend(response.tokens.token_ids)
        self.ended = response.HasField("result")
        return True

    async def read_all(self) -> None:
        while await self.read():
            pass


def metric(gateway: GatewayRun, name: str) -> float:
    lines = generate_latest(gateway.gateway.metrics.registry).decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


async def test_a_reader_that_stops_reading_is_dropped_and_reads_on_where_it_stands(rig: Rig) -> None:
    gateway = await rig.gateway(
        context_tokens_max=CONTEXT_TOKENS_MAX,
        stream_buffer_tokens_max=BUFFER_TOKENS_MAX,
        stream_buffers_tokens_max=BUFFERS_TOKENS_MAX,
        stream_stall_s=0.3,
    )
    async with grpc.aio.insecure_channel(gateway.address, options=NARROW) as channel, qlm.AsyncClient(gateway.address) as client:
        readers = [Stalled(channel, [index + 1], 4_000) for index in range(10)]
        for reader in readers:
            assert await reader.read()  # Accepted
        attentive = client.generate(MODEL, PROMPT, max_tokens=4_000)
        await attentive.wait_accepted()
        await rig.agent.start_all()
        given = 0
        for _ in range(38):
            await rig.agent.step(STEP_TOKENS)
            # Somebody who reads gets every step at once, whatever the others do.
            while attentive.offset < given + STEP_TOKENS:
                assert await anext(attentive)
            given += STEP_TOKENS
            assert gateway.gateway._hub._machine.buffered_tokens <= BUFFERS_TOKENS_MAX + PIECE_TOKENS * len(readers)
        await until(lambda: gateway.gateway._hub._machine.buffered_tokens == 0, "what the stalled were given is forgotten")
        assert metric(gateway, "qlm_gateway_stream_overruns_total") >= len(readers)
        tasks = [asyncio.create_task(reader.read_all()) for reader in readers]
        for _ in range(2):
            await rig.agent.step(STEP_TOKENS)
        await asyncio.gather(*tasks)
        assert [reader.read_tokens for reader in readers] == [reader.expected for reader in readers]
        assert all(reader.ended for reader in readers)
        assert concatenated([chunk.token_ids async for chunk in attentive]) == expected_tokens(PROMPT, 4_000)[given:]


async def test_a_stalled_reader_of_a_request_that_ended_reads_its_end_from_the_record(rig: Rig) -> None:
    gateway = await rig.gateway(context_tokens_max=CONTEXT_TOKENS_MAX, stream_stall_s=0.2)
    async with grpc.aio.insecure_channel(gateway.address, options=NARROW) as channel:
        reader = Stalled(channel, PROMPT, 3_000)
        assert await reader.read()
        await rig.agent.start_all()
        for _ in range(30):
            await rig.agent.step(STEP_TOKENS)
        assert not rig.agent.running
        await until(lambda: metric(gateway, "qlm_gateway_stream_overruns_total") >= 1.0, "the reader fell behind")
        assert gateway.gateway._hub._machine.buffered_tokens == 0
        await reader.read_all()
        assert reader.ended
        assert reader.read_tokens == reader.expected


async def test_a_drain_does_not_wait_for_a_reader_that_reads_nothing(rig: Rig) -> None:
    first = await rig.gateway(context_tokens_max=CONTEXT_TOKENS_MAX, drain_grace_s=0.3)
    other = await rig.gateway(context_tokens_max=CONTEXT_TOKENS_MAX)
    async with grpc.aio.insecure_channel(first.address, options=NARROW) as channel, qlm.AsyncClient(other.address) as client:
        reader = Stalled(channel, PROMPT, 6_000)
        assert await reader.read()
        await rig.agent.start_all()
        for _ in range(50):
            await rig.agent.step(STEP_TOKENS)
        request_id = rig.agent.running[next(iter(rig.agent.running))].request.request_id
        stopping = asyncio.create_task(first.stop())
        await until(stopping.done, "the drain ended")
        # It is cut off; what it has is right, and the rest is to be had elsewhere.
        with suppress(grpc.RpcError):
            await reader.read_all()
        assert not reader.ended
        assert reader.read_tokens == reader.expected[: len(reader.read_tokens)]
        resumed = client.stream(request_id, len(reader.read_tokens))
        rest = asyncio.create_task(_tokens_of(resumed))
        for _ in range(10):
            await rig.agent.step(STEP_TOKENS)
        assert reader.read_tokens + await rest == reader.expected


async def test_more_streams_than_allowed_are_refused_with_a_hint_and_go_to_another_gateway(rig: Rig) -> None:
    one, two = await rig.gateway(streams_max=2), await rig.gateway()
    async with qlm.AsyncClient(one.address, reconnect_attempts_max=0) as client, qlm.AsyncClient([one.address, two.address]) as roaming:
        streams = [client.generate(MODEL, [index + 1], max_tokens=4) for index in range(3)]
        for stream in streams[:2]:
            await stream.wait_accepted()
        for refused_call in (streams[2].wait_accepted(), client.result("r", 1.0), anext(client.stream("r"))):
            with pytest.raises(GatewayFull) as refused:
                await refused_call
            assert refused.value.details["limit"] == "2"
            assert refused.value.retry_after_s == pytest.approx(0.5)
        async with grpc.aio.insecure_channel(one.address) as channel:
            with pytest.raises(grpc.RpcError) as on_the_wire:
                await GatewayStub(channel).Generate(GenerateRequest(request=Request(model=MODEL, text="x")), timeout=PATIENCE_S).read()
            assert on_the_wire.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert from_rpc_error(on_the_wire.value).reason == "STREAMS_FULL"
        assert (await client.submit(MODEL, PROMPT, max_tokens=3)).request_id  # no stream: taken
        elsewhere = roaming.generate(MODEL, [9], max_tokens=4)
        assert (await elsewhere.wait_accepted()).duplicate is False
        assert elsewhere.address == two.address
        rig.serve()
        assert await _tokens_of(streams[0]) == expected_tokens([1], 4)
        assert await _tokens_of(elsewhere) == expected_tokens([9], 4)
        # One has ended: there is room again.
        await until(lambda: one.gateway._hub._machine.reader_count < 2, "the stream's place is free")
        assert await _tokens_of(client.generate(MODEL, [7], max_tokens=4)) == expected_tokens([7], 4)


async def test_memory_stays_flat_while_hundreds_of_readers_do_not_read(rig: Rig, tmp_path: Path) -> None:
    """A real gateway process: 100 calls that read nothing, whose requests run all the time."""
    readers_count, warm_up, steps, step_tokens = 100, 25, 75, 300
    async with (
        gateway_process(rig, tmp_path, context_tokens_max=CONTEXT_TOKENS_MAX, stream_stall_s=0.5) as gateway,
        grpc.aio.insecure_channel(gateway.address, options=NARROW) as channel,
    ):
        readers = [Stalled(channel, [index + 1], 60_000) for index in range(readers_count)]
        for reader in readers:
            assert await reader.read()
        while len(rig.agent.running) < readers_count:
            await rig.agent.start_all()

        async def stream(steps: int) -> int:
            """So many steps, all of them read by the gateway; its resident bytes then."""
            seen = await gateway.metric("qlm_gateway_frames_total")
            for _ in range(steps):
                await rig.agent.step(step_tokens)
            while await gateway.metric("qlm_gateway_frames_total") < seen + steps * readers_count:
                await asyncio.sleep(0.05)
            return gateway.resident_bytes

        before = await stream(warm_up)
        grown = await stream(steps) - before
        # 2.25 million tokens arrived meanwhile: 9 MB as four bytes each, 80 MB as Python objects.
        assert grown < 5 << 20, f"{grown} bytes more"
        assert await gateway.metric("qlm_gateway_stream_overruns_total") >= readers_count
        assert await gateway.metric("qlm_gateway_buffered_tokens") <= readers_count * step_tokens
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateway.process.wait(), PATIENCE_S) == 0
        for reader in readers:
            reader.call.cancel()


async def _tokens_of(stream: qlm.TokenStream) -> list[int]:
    return concatenated([chunk.token_ids async for chunk in stream])
