"""A load generator's connection to one gateway: plain gRPC with messages as bytes, cheap for the client."""

from __future__ import annotations

from typing import Any, cast

import grpc.aio

SUBMIT = "/qlm.api.v1.Gateway/Submit"
GENERATE = "/qlm.api.v1.Gateway/Generate"
STREAM_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 20.0

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
