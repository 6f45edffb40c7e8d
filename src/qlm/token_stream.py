"""One request's output as an asynchronous iterator that outlives its connections."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Self

import grpc
import grpc.aio
from opentelemetry.trace import Span, Status, StatusCode

from qlm.api.v1 import gateway_pb2, request_pb2
from qlm.errors import CallDeadlineExceeded, InternalError, QlmError, RequestEnded, Unavailable
from qlm.link import Link, Metadata
from qlm.messages import accepted_value, chunk_value, result_value
from qlm.stream_position import ChunkFate, StreamPosition
from qlm.values import Accepted, RequestState, Result, TokenChunk
from qlm.wire_errors import error_class, from_rpc_error

STREAM_CALL_S = 600.0
"""Deadline of one streaming call; the stream goes on with the next one."""

Event = Accepted | TokenChunk | Result
Call = (
    grpc.aio.UnaryStreamCall[gateway_pb2.GenerateRequest, gateway_pb2.StreamResponse]
    | grpc.aio.UnaryStreamCall[gateway_pb2.StreamRequest, gateway_pb2.StreamResponse]
)


class TokenStream:
    """Chunks of output, each token once and in order: iterate over it once, with `async for`.

    `accepted`: set with the first chunk at the latest (`wait_accepted` waits for it); None on a stream of a request that was accepted
    before. `result`: set when the iteration has ended. Output that was given is never taken back. `address`: the gateway that it comes
    from, or came from last. `resumes`: how often it went on, after acceptance, where a connection had ended.

    A lost connection, a gateway that stops and a queue that is away are retried, also at the other addresses, from where the output
    stands; after the client's `reconnect_attempts_max` attempts without progress the last error is raised. Raises RequestEnded where the
    request ends as FAILED, CANCELLED or EXPIRED, CallDeadlineExceeded after `timeout_s`. Closing (`aclose`, or leaving `async with`) does
    not cancel the request.
    """

    def __init__(
        self,
        link: Link,
        *,
        tenant: str,
        request_id: str,
        offset: int = 0,
        timeout_s: float = math.inf,
        request: request_pb2.Request | None = None,
        metadata: Metadata = (),
        span: Span | None = None,
    ) -> None:
        self.tenant = tenant
        self.request_id = request_id
        self.accepted: Accepted | None = None
        self.result: Result | None = None
        self.address = ""
        self.resumes = 0
        self._link = link
        self._request = request
        self._metadata = metadata
        self._span = span
        self._timeout_s = timeout_s
        self._deadline_s = math.inf
        self._position = StreamPosition(offset)
        self._events = self._reconnecting()

    @property
    def offset(self) -> int:
        """The first token that has not been given yet."""
        return self._position.next

    async def wait_accepted(self) -> Accepted:
        """What is known at acceptance, before any output. Raises QlmError; InternalError on a stream of an accepted request."""
        if self._request is None:
            raise InternalError("this stream is of a request that was accepted before")
        if self.accepted is None:
            await self._next_event()
        assert self.accepted is not None, "a gateway answers Generate with Accepted first"
        return self.accepted

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        while True:
            event = await self._next_event()
            if isinstance(event, TokenChunk):
                return event
            if isinstance(event, Result):
                if event.state is not RequestState.COMPLETED:
                    raise ended_error(event)
                raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Breaks the call off. Safe twice."""
        await self._events.aclose()
        self._end_span("")

    async def _next_event(self) -> Event:
        try:
            event = await anext(self._events)
        except QlmError as error:
            self._end_span(error.reason)
            raise
        if isinstance(event, Accepted):
            self.accepted = event
        elif isinstance(event, Result):
            self.result = event
            self._end_span(event.error_reason)
        return event

    def _end_span(self, reason: str) -> None:
        span, self._span = self._span, None
        if span is not None:
            if reason:
                span.set_status(Status(StatusCode.ERROR, reason))
            span.end()

    async def _reconnecting(self) -> AsyncGenerator[Event]:
        """Events of one connection after the other, up to the Result."""
        clock = asyncio.get_running_loop().time
        self._deadline_s = clock() + self._timeout_s
        backoff = self._link.new_backoff()
        while True:
            address = self._link.address
            started_s = clock()
            try:
                async with aclosing(self._connection()) as events:
                    async for event in events:
                        backoff.progress()
                        yield event
                        if isinstance(event, Result):
                            return
                error: QlmError = Unavailable("the stream ended without a result")
            except QlmError as failure:
                error = failure
            if clock() >= self._deadline_s:
                raise CallDeadlineExceeded(f"no end after {self._timeout_s} s; the request goes on") from error
            if isinstance(error, CallDeadlineExceeded) and clock() - started_s >= STREAM_CALL_S / 2:
                continue  # a long stream takes several calls
            pause_s = backoff.next_pause_s(error)
            self._link.move_on(address)
            await asyncio.sleep(min(pause_s, max(0.0, self._deadline_s - clock())))

    async def _connection(self) -> AsyncGenerator[Event]:
        """Events of one call, without those that are known. Raises QlmError."""
        call, await_accepted = self._start_call()
        try:
            while True:
                # Acceptance is quick or fails; after that a stream may be silent for as long as its request waits.
                async with asyncio.timeout(self._link.call_timeout_s if await_accepted else None):
                    response = await call.read()
                if not isinstance(response, gateway_pb2.StreamResponse):
                    return  # the end of the stream
                await_accepted = False
                event = self._event(response)
                if event is not None:
                    yield event
        except grpc.RpcError as failure:
            raise from_rpc_error(failure) from failure
        except TimeoutError as error:
            raise CallDeadlineExceeded(f"no answer in {self._link.call_timeout_s} s") from error
        finally:
            call.cancel()

    def _start_call(self) -> tuple[Call, bool]:
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        timeout_s = min(STREAM_CALL_S, max(left_s, 0.001))
        stub = self._link.stub()
        self.address = self._link.address
        if self._request is not None and self.accepted is None:
            generate = gateway_pb2.GenerateRequest(request=self._request)
            return stub.Generate(generate, timeout=timeout_s, metadata=self._metadata), True
        self.resumes += self._request is not None
        resume = gateway_pb2.StreamRequest(tenant=self.tenant, request_id=self.request_id, offset=self._position.next)
        return stub.Stream(resume, timeout=timeout_s, metadata=self._metadata), False

    def _event(self, response: gateway_pb2.StreamResponse) -> Event | None:
        match response.WhichOneof("event"):
            case "accepted":
                return accepted_value(response.accepted)
            case "tokens":
                chunk = chunk_value(response.tokens)
                match self._position.on_chunk(chunk.offset, chunk.count):
                    case ChunkFate.TAKE:
                        return chunk
                    case ChunkFate.DROP:
                        return None
                    case ChunkFate.ASK:
                        raise Unavailable(f"tokens from {chunk.offset} came where {self._position.next} was next")
            case "result":
                return result_value(response.result)
        return None  # an event of a newer version


def ended_error(result: Result) -> RequestEnded:
    """The error that a Result other than COMPLETED stands for."""
    kind = error_class(result.error_reason)
    error = kind if issubclass(kind, RequestEnded) else RequestEnded
    message = result.error_message or f"the request ended as {result.state.value}"
    details = {"state": result.state.value, "tenant": result.tenant, "request_id": result.request_id}
    return error(message, reason=result.error_reason or None, details=details)
