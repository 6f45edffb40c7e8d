"""How a stream of the SDK ends, other than by its result: left, timed out, cancelled, forgotten. Nothing stays open behind it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import qlm
from qlm.errors import CallDeadlineExceeded, InternalError, NotFound, RequestEnded
from qlm.values import RequestState

from .gateway_rig import MODEL, GatewayRun, Rig, concatenated, expected_tokens, until

PROMPT = [5, 6, 7]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Objects closed here are closed by their last reference."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def readers_of(gateway: GatewayRun) -> int:
    return gateway.gateway._hub._machine.reader_count


async def test_a_break_closes_the_call_at_once_and_ends_its_span(rig: Rig) -> None:
    exporter = InMemorySpanExporter()
    rig.tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    gateway = await rig.gateway()
    rig.serve()
    async with qlm.AsyncClient(gateway.address, tracer_provider=rig.tracer_provider) as client:
        with no_garbage_collection():
            async for chunk in client.generate(MODEL, PROMPT, max_tokens=2_000, request_id="r"):
                assert chunk.offset == 0
                break
            await until(lambda: readers_of(gateway) == 0, "the gateway forgot the reader")
            await until(lambda: "qlm.client.request" in {span.name for span in exporter.get_finished_spans()}, "the span ended")
        status = await client.status("r")
        assert status.request is not None
        assert not status.request.state.terminal or status.request.output_tokens == 2_000


async def test_a_wait_that_times_out_loses_nothing(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        stream = client.generate(MODEL, PROMPT, max_tokens=6)
        await stream.wait_accepted()
        for step in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await anext(stream)
            if step == 0:
                await rig.agent.start_all()
            await rig.agent.step(2)
            assert list((await anext(stream)).token_ids) == expected_tokens(PROMPT, 6)[2 * step : 2 * step + 2]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert stream.result is not None
        assert stream.resumes >= 2
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_timeout_bounds_all_waits_of_a_stream_together(rig: Rig) -> None:
    gateway = await rig.gateway()
    loop = asyncio.get_running_loop()
    async with qlm.AsyncClient(gateway.address) as client:
        stream = client.generate(MODEL, PROMPT, timeout_s=0.5)
        started_s = loop.time()
        waits = 0
        while True:
            try:
                async with asyncio.timeout(0.2):
                    await anext(stream)
            except TimeoutError:
                waits += 1
                assert loop.time() - started_s < 30.0
            except CallDeadlineExceeded:
                break
        assert waits >= 1


async def test_a_stream_cancels_its_request(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        stream = client.generate(MODEL, PROMPT, max_tokens=10)
        with pytest.raises(NotFound):
            await stream.cancel()
        await stream.wait_accepted()
        await rig.agent.start_all()
        await rig.agent.step(4)
        tokens = list((await anext(stream)).token_ids)
        assert await stream.cancel() is RequestState.CANCELLED
        with pytest.raises(RequestEnded) as ended:
            await anext(stream)
        assert ended.value.reason == "CANCELLED"
        assert tokens == expected_tokens(PROMPT, 4)
        assert await stream.cancel() is RequestState.CANCELLED


async def test_closing_the_client_ends_its_streams_and_leaves_their_requests(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address, reconnect_attempts_max=0) as client:
        stream = client.generate(MODEL, PROMPT, max_tokens=4, request_id="r")
        await stream.wait_accepted()
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
    # An error, not a cancellation: the task that reads was not cancelled.
    with pytest.raises(InternalError):
        await reading
    for call in (client.models(), client.submit(MODEL, PROMPT), anext(client.stream("r"))):
        with pytest.raises(InternalError):
            await call
    await until(lambda: readers_of(gateway) == 0, "the gateway forgot the reader")
    rig.serve()
    async with qlm.AsyncClient(gateway.address) as client:
        assert concatenated([chunk.token_ids async for chunk in client.stream("r")]) == expected_tokens(PROMPT, 4)


async def test_the_synchronous_client_leaves_nothing_open(rig: Rig) -> None:
    gateway = await rig.gateway()
    rig.serve()

    def use() -> list[int]:
        with qlm.Client(gateway.address) as client:
            for _ in client.generate(MODEL, PROMPT, max_tokens=2_000, request_id="left"):
                break
            with client.generate(MODEL, PROMPT, max_tokens=5) as stream:
                tokens = concatenated(chunk.token_ids for chunk in stream)
            assert stream.address == gateway.address
            assert stream.resumes == 0
            with client.stream("left") as again:
                assert again.accepted is None
                assert list(next(again).token_ids)[:3] == expected_tokens(PROMPT, 3)
                assert again.cancel().terminal
        with pytest.raises(InternalError):
            client.models()
        again.close()
        client.close()
        return tokens

    with no_garbage_collection():
        assert await asyncio.to_thread(use) == expected_tokens(PROMPT, 5)
        await until(lambda: readers_of(gateway) == 0, "the gateway forgot the readers")


async def test_a_call_that_its_peer_breaks_off_is_retried_elsewhere(rig: Rig) -> None:
    """The status CANCELLED, which proxies and dying servers send, is not a cancellation of ours."""

    async def break_off(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await context.abort(grpc.StatusCode.CANCELLED, "gone")

    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(break_off),
        "ListModels": grpc.unary_unary_rpc_method_handler(break_off),
    }
    proxy = grpc.aio.server()
    proxy.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("qlm.api.v1.Gateway", handlers),))
    address = f"127.0.0.1:{proxy.add_insecure_port('127.0.0.1:0')}"
    await proxy.start()
    gateway = await rig.gateway()
    rig.serve()
    try:
        async with qlm.AsyncClient([address, gateway.address]) as client:
            stream = client.generate(MODEL, PROMPT, max_tokens=4)
            assert concatenated([chunk.token_ids async for chunk in stream]) == expected_tokens(PROMPT, 4)
            assert stream.address == gateway.address
        async with qlm.AsyncClient([address, gateway.address]) as client:
            assert len(await client.models()) == 1
    finally:
        await proxy.stop(None)
