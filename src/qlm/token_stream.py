"""One request's output as an asynchronous iterator that outlives its connections."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Self

from opentelemetry.trace import Span

from qlm.api.v1 import gateway_pb2, request_pb2
from qlm.errors import InternalError, RequestEnded
from qlm.link import Link, Metadata
from qlm.messages import STATES
from qlm.stream_calls import Event, StreamCalls
from qlm.values import Accepted, Outlook, Prediction, RequestState, Result, TokenChunk
from qlm.wire_errors import error_class


class TokenStream:
    """Chunks of output, each token once and in order: iterate over it once, with `async for`.

    A lost connection, a gateway that stops and a queue that is away are retried, also at the other addresses, from where the output
    stands; after the client's `reconnect_attempts_max` attempts without progress the last error is raised. Output that was given is never
    taken back. Raises RequestEnded where the request ends as FAILED, CANCELLED or EXPIRED, CallDeadlineExceeded after `timeout_s`.

    A wait for the next chunk may be cancelled, as by `asyncio.timeout`: the next one goes on where the output stands. Leaving the loop,
    `aclose`, or the end of an `async with` breaks the call off and leaves the request as it is: it runs to its end, and
    `client.stream(request_id, offset)` goes on from any place. `cancel` ends the request itself.
    """

    def __init__(
        self,
        link: Link,
        *,
        tenant: str,
        request_id: str,
        offset: int = 0,
        timeout_s: float = math.inf,
        outlook_every_s: float = 0.0,
        on_outlook: Callable[[Outlook], None] | None = None,
        request: request_pb2.Request | None = None,
        metadata: Metadata = (),
        span: Span | None = None,
    ) -> None:
        self.result: Result | None = None
        self._on_outlook = on_outlook
        self._calls = StreamCalls(
            link,
            tenant=tenant,
            request_id=request_id,
            offset=offset,
            timeout_s=timeout_s,
            outlook_every_s=outlook_every_s,
            request=request,
            metadata=metadata,
            span=span,
        )
        # Nothing in there knows this object: the last reference to it, dropped by a `break`, closes the call at once.
        self._events = self._calls.events()

    @property
    def tenant(self) -> str:
        return self._calls.tenant

    @property
    def request_id(self) -> str:
        return self._calls.request_id

    @property
    def offset(self) -> int:
        """The first token that has not been given yet."""
        return self._calls.position.next

    @property
    def accepted(self) -> Accepted | None:
        """Set with the first chunk at the latest (`wait_accepted` waits for it); None on a stream of a request that was accepted before."""
        return self._calls.accepted

    @property
    def prediction(self) -> Prediction | None:
        """When it starts and ends, from the moment of this prediction: at acceptance, and anew every `outlook_every_s` while it waits. None
        before that, after the first output, and where no prediction can be made."""
        return self._calls.prediction

    @property
    def address(self) -> str:
        """The gateway that sends the output, or sent the last; "" before the first call."""
        return self._calls.address

    @property
    def resumes(self) -> int:
        """How often it resumed, after acceptance, when a connection had ended."""
        return self._calls.resumes

    async def wait_accepted(self) -> Accepted:
        """Returns the facts of acceptance, before any output. Raises QlmError; InternalError on a stream of an accepted request."""
        if self._calls.request is None:
            raise InternalError("this stream is of a request that was accepted before")
        if self.accepted is None:
            await self._next_event()
        assert self.accepted is not None, "a gateway answers Generate with Accepted first"
        return self.accepted

    async def cancel(self) -> RequestState:
        """Ends the request as CANCELLED, unless it has ended; returns its terminal state. The stream goes on to its end, which it then
        raises as RequestEnded. Raises NotFound before acceptance."""
        message = gateway_pb2.CancelRequest(tenant=self.tenant, request_id=self.request_id)
        response = await self._calls.link.call(lambda stub: stub.Cancel, message)
        return STATES[response.state]

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
        self._calls.end_span("")  # a stream that nobody waited for has no call to end it

    async def _next_event(self) -> Event:
        try:
            event = await anext(self._events)
        except asyncio.CancelledError:
            self._events = self._calls.events()  # the next wait goes on from here
            raise
        if isinstance(event, Outlook) and self._on_outlook is not None:
            self._on_outlook(event)
        if isinstance(event, Result):
            self.result = event
            await self._events.aclose()
        return event


def ended_error(result: Result) -> RequestEnded:
    """The error that a Result other than COMPLETED stands for."""
    kind = error_class(result.error_reason)
    error = kind if issubclass(kind, RequestEnded) else RequestEnded
    message = result.error_message or f"the request ended as {result.state.value}"
    details = {"state": result.state.value, "tenant": result.tenant, "request_id": result.request_id}
    return error(message, reason=result.error_reason or None, details=details)
