"""Load over gRPC with messages as bytes, cheap for the client: unary accepts, an open loop of short streams, and many long ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, cast

import grpc.aio

from benchmarks.queue.load_loops import closed_loop, open_loop, traceparent, window
from benchmarks.queue.prompts import PromptSource
from benchmarks.queue.schedule import summary_ms
from benchmarks.queue.worker import Report, Settings
from qlm.api.v1.gateway_pb2 import GenerateRequest, StreamResponse, SubmitRequest, SubmitResponse

SUBMIT = "/qlm.api.v1.Gateway/Submit"
GENERATE = "/qlm.api.v1.Gateway/Generate"
STREAM_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 20.0
TRIES_MAX = 5

TOKENS = 0x12
"""First byte of a StreamResponse that carries tokens: the tag of its field 2."""


class LoadClient:
    """One channel; an asynchronous context manager. Requests and answers are serialized messages."""

    def __init__(self, address: str) -> None:
        # Without serializers messages are bytes; the type stubs lack this case.
        self._channel = cast(Any, grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)))
        self._submit = self._channel.unary_unary(SUBMIT)
        self._generate = self._channel.unary_stream(GENERATE)

    async def __aenter__(self) -> LoadClient:
        await self._channel.channel_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def submit(self, request: bytes) -> bytes:
        """A SubmitRequest -> its SubmitResponse. Raises grpc.aio.AioRpcError."""
        answer: bytes = await self._submit(request, timeout=CALL_TIMEOUT_S)
        return answer

    def generate(self, request: bytes) -> Any:
        """A GenerateRequest -> a call to iterate over, which yields StreamResponses."""
        return self._generate(request, timeout=STREAM_TIMEOUT_S)


def source_of(settings: Settings) -> PromptSource:
    return PromptSource(**{name: settings[name] for name in ("seed", "run_id", "prompt_tokens", "output_tokens", "slo_s")})


def _messages(settings: Settings, count: int) -> list[bytes]:
    """Made before the run, which then only sends."""
    source = source_of(settings)
    prompts = source.prompts()
    messages: list[bytes] = []
    for index in range(count):
        message = GenerateRequest(request=prompts[index % len(prompts)])
        message.request.request_id = source.request_id(index)
        message.request.trace.traceparent = traceparent(index)
        messages.append(message.SerializeToString())
    return messages


async def accepts(settings: Settings) -> Report:
    """A closed loop of Submit. One refused as UNAVAILABLE is sent again with its id, as a client does. Reports also how many `ids`
    differ, and refusals by code."""
    source = source_of(settings)
    prompts = source.prompts()
    errors: Counter[str] = Counter()
    async with LoadClient(settings["address"]) as client:

        async def call(index: int) -> bytes:
            message = SubmitRequest(request=prompts[index % len(prompts)])
            message.request.request_id = source.request_id(index)
            data = message.SerializeToString()
            for _ in range(TRIES_MAX - 1):
                try:
                    return await client.submit(data)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    errors[error.code().name] += 1
            return await client.submit(data)

        answers, report = await closed_loop(settings, lambda: nullcontext(call))
    ids = len({SubmitResponse.FromString(answer).accepted.queue_id for answer in answers})
    return {**report, "ids": ids, "repeated": dict(errors)}


async def streams(settings: Settings) -> Report:
    """An open loop of Generate."""
    async with LoadClient(settings["address"]) as client:

        def prepare(count: int) -> Callable[[int], Awaitable[float | str]]:
            messages = _messages(settings, count)

            async def serve(index: int) -> float | str:
                last_token_s = 0.0
                try:
                    async for message in client.generate(messages[index]):
                        if message[0] == TOKENS:
                            last_token_s = time.perf_counter()
                except grpc.aio.AioRpcError as error:
                    return error.code().name
                return last_token_s or "NO_TOKENS"

            return serve

        return await open_loop(settings, prepare)


async def fanout(settings: Settings) -> Report:
    """Long answers in a window. Reports messages and tokens received in it, and the gaps between the messages of a stream that end in
    it."""
    messages = _messages(settings, settings["streams"])
    received: list[list[tuple[float, bytes]]] = [[] for _ in messages]
    async with LoadClient(settings["address"]) as client:

        async def follow(index: int, begun: Callable[[], None]) -> None:
            mine = received[index]
            async for message in client.generate(messages[index]):
                mine.append((time.perf_counter(), message))
                if len(mine) == 2:  # after the acceptance, the first tokens
                    begun()

        begin_s, end_s, report = await window(settings, follow)
    streams = [[(at_s, _token_count(message)) for at_s, message in mine if message[0] == TOKENS] for mine in received]
    counted = [tokens for stream in streams for at_s, tokens in stream if begin_s <= at_s < end_s]
    return {**report, "messages": len(counted), "tokens": sum(counted), "itl_ms": summary_ms(gaps_s(streams, begin_s, end_s))}


def _token_count(message: bytes) -> int:
    return len(StreamResponse.FromString(message).tokens.token_ids)


def gaps_s(streams: Sequence[Sequence[tuple[float, int]]], begin_s: float, end_s: float) -> list[float]:
    return [later - earlier for stream in streams for (earlier, _), (later, _) in pairwise(stream) if begin_s <= later < end_s]
