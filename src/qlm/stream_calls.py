"""The calls behind one stream of output: one after the other, at any gateway, from where the output stands."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import grpc
import grpc.aio
from opentelemetry.trace import Span, Status, StatusCode

from qlm.api.v1 import gateway_pb2, request_pb2
from qlm.errors import CallDeadlineExceeded, QlmError, Unavailable
from qlm.link import Link, Metadata, closed_under
from qlm.messages import accepted_value, chunk_value, outlook_value, result_value
from qlm.stream_position import ChunkFate, StreamPosition
from qlm.values import Accepted, Outlook, Prediction, Result, TokenChunk
from qlm.wire_errors import from_rpc_error

STREAM_CALL_S = 600.0
"""Deadline of one streaming call; the stream goes on with the next one."""

Event = Accepted | Outlook | TokenChunk | Result
Call = (
    grpc.aio.UnaryStreamCall[gateway_pb2.GenerateRequest, gateway_pb2.StreamResponse]
    | grpc.aio.UnaryStreamCall[gateway_pb2.StreamRequest, gateway_pb2.StreamResponse]
)


class StreamCalls:
    """`request`: what is to be accepted first; None for a request that was. `span`: ended with the events. Received so far:
    `position`, `accepted`, `prediction` (the newest, while it waits), `address` (the gateway of the last call) and `resumes` (calls after
    the one that accepted)."""

    def __init__(
        self,
        link: Link,
        *,
        tenant: str,
        request_id: str,
        offset: int,
        timeout_s: float,
        outlook_every_s: float,
        request: request_pb2.Request | None,
        metadata: Metadata,
        span: Span | None,
    ) -> None:
        self.link = link
        self.tenant = tenant
        self.request_id = request_id
        self.request = request
        self.position = StreamPosition(offset)
        self.accepted: Accepted | None = None
        self.prediction: Prediction | None = None
        self.address = ""
        self.resumes = 0
        self._metadata = (*metadata, *link.credentials.metadata)
        self._span = span
        self._timeout_s = timeout_s
        self._outlook_every_s = outlook_every_s
        self._deadline_s = math.inf

    async def events(self) -> AsyncGenerator[Event]:
        """Events up to the Result, from where they stand. Raises QlmError. Closing it breaks the call off."""
        reason = ""
        try:
            async with aclosing(self._reconnecting()) as events:
                async for event in events:
                    if isinstance(event, (Accepted, Outlook)):
                        self.prediction = event.prediction
                    else:
                        self.prediction = None
                    if isinstance(event, Accepted):
                        self.accepted = event
                    elif isinstance(event, Result):
                        reason = event.error_reason
                    yield event
        except QlmError as error:
            reason = error.reason
            raise
        finally:
            self.end_span(reason)

    def end_span(self, reason: str) -> None:
        """Ends the request's span, with an error where there is a reason. Safe twice."""
        span, self._span = self._span, None
        if span is not None:
            if reason:
                span.set_status(Status(StatusCode.ERROR, reason))
            span.end()

    async def _reconnecting(self) -> AsyncGenerator[Event]:
        """Events of one connection after the other, up to the Result."""
        clock = asyncio.get_running_loop().time
        if self._deadline_s == math.inf:
            self._deadline_s = clock() + self._timeout_s
        backoff = self.link.new_backoff()
        while True:
            address = self.link.address
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
            self.link.move_on(address)
            await asyncio.sleep(min(pause_s, max(0.0, self._deadline_s - clock())))

    async def _connection(self) -> AsyncGenerator[Event]:
        """Events of one call, without those that are known. Raises QlmError."""
        call, await_accepted = self._start_call()
        try:
            while True:
                # Acceptance is quick or fails; after that a stream may be silent for as long as its request waits.
                if await_accepted:
                    async with asyncio.timeout(self.link.call_timeout_s):
                        response = await call.read()
                else:
                    response = await call.read()
                if not isinstance(response, gateway_pb2.StreamResponse):
                    return  # the end of the stream
                await_accepted = False
                for event in self._events(response):
                    yield event
        except grpc.RpcError as failure:
            raise from_rpc_error(failure) from failure
        except asyncio.CancelledError as failure:
            raise closed_under(failure) from failure
        except TimeoutError as error:
            raise CallDeadlineExceeded(f"no answer in {self.link.call_timeout_s} s") from error
        finally:
            call.cancel()

    def _start_call(self) -> tuple[Call, bool]:
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        timeout_s = min(STREAM_CALL_S, max(left_s, 0.001))
        stub = self.link.stub()
        self.address = self.link.address
        if self.request is not None and self.accepted is None:
            generate = gateway_pb2.GenerateRequest(request=self.request, outlook_every_s=self._outlook_every_s)
            return stub.Generate(generate, timeout=timeout_s, metadata=self._metadata), True
        self.resumes += self.request is not None
        resume = gateway_pb2.StreamRequest(
            tenant=self.tenant, request_id=self.request_id, offset=self.position.next, outlook_every_s=self._outlook_every_s
        )
        return stub.Stream(resume, timeout=timeout_s, metadata=self._metadata), False

    def _events(self, response: gateway_pb2.StreamResponse) -> Iterator[Event]:
        if response.HasField("accepted"):
            yield accepted_value(response.accepted)
        if response.HasField("tokens"):
            chunk = chunk_value(response.tokens)
            match self.position.on_chunk(chunk.offset, chunk.count):
                case ChunkFate.TAKE:
                    yield chunk
                case ChunkFate.DROP:
                    pass
                case ChunkFate.ASK:
                    raise Unavailable(f"received tokens from {chunk.offset} where {self.position.next} was next")
        if response.HasField("outlook"):
            yield outlook_value(response.outlook)
        if response.HasField("result"):
            yield result_value(response.result)
