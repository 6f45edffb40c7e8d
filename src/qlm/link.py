"""Shared parts of a client's calls: connections, deadlines, retries and trace context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracerProvider, Span, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from qlm.channels import Channels, client_closed
from qlm.credentials import Credentials
from qlm.errors import InternalError, QlmError
from qlm.retry import Backoff
from qlm.wire_errors import from_rpc_error
from qlm_core.vocabulary.errors import invalid_field

if TYPE_CHECKING:
    from qlm.api.v1.gateway_pb2_grpc import GatewayAsyncStub  # known to the type stubs alone

Message = TypeVar("Message")
Answer = TypeVar("Answer")
Metadata = tuple[tuple[str, str], ...]

REQUEST_SPAN = "qlm.client.request"


class Link:
    """`random`: in [0, 1), for jitter. Every call has a deadline; attempts without progress are bounded."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        call_timeout_s: float,
        reconnect_attempts_max: int,
        reconnect_backoff_max_s: float,
        tracer_provider: TracerProvider | None,
        credentials: Credentials,
        random: Callable[[], float],
    ) -> None:
        self.call_timeout_s = call_timeout_s
        self.credentials = credentials
        self._channels = Channels(addresses, credentials)
        self._attempts_max = reconnect_attempts_max
        self._backoff_max_s = reconnect_backoff_max_s
        self._random = random
        self._tracer = (tracer_provider or NoOpTracerProvider()).get_tracer("qlm")

    @property
    def address(self) -> str:
        """The gateway that the next call goes to."""
        return self._channels.address

    def stub(self) -> GatewayAsyncStub:
        return self._channels.stub()

    def move_on(self, failed_address: str) -> None:
        """To another gateway than the one that failed."""
        self._channels.move_on(failed_address)

    def new_backoff(self) -> Backoff:
        return Backoff(attempts_max=self._attempts_max, max_s=self._backoff_max_s, addresses=len(self._channels), random=self._random)

    async def close(self) -> None:
        """Safe twice."""
        await self._channels.close()

    async def call(
        self,
        method: Callable[[GatewayAsyncStub], grpc.aio.UnaryUnaryMultiCallable[Message, Answer]],
        message: Message,
        *,
        metadata: Metadata = (),
        extra_s: float = 0.0,
    ) -> Answer:
        """A call that may be repeated, at one gateway after the other. Its deadline is the call timeout and `extra_s`, in which the gateway
        waits on purpose. Raises QlmError."""
        metadata = (*metadata, *self.credentials.metadata)
        backoff = self.new_backoff()
        while True:
            address = self.address
            try:
                return await method(self.stub())(message, timeout=self.call_timeout_s + extra_s, metadata=metadata)
            except grpc.RpcError as failure:
                error: QlmError = from_rpc_error(failure)
            except asyncio.CancelledError as failure:
                raise closed_under(failure) from failure
            pause_s = backoff.next_pause_s(error)
            self.move_on(address)
            await asyncio.sleep(pause_s)

    def start_span(self, model: str, request_id: str, tenant: str, context: Context | None) -> Span:
        """The span of one request; `context`: that of its parent, None for the current one."""
        attributes = {"qlm.request_id": request_id, "qlm.tenant": tenant, "qlm.model": model}
        return self._tracer.start_span(REQUEST_SPAN, context=context, attributes=attributes)


def closed_under(failure: asyncio.CancelledError) -> InternalError:
    """The error of a call whose channel was closed: grpc.aio raises CancelledError for that, as if the caller's task were cancelled. Raises
    the failure itself where it is."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise failure
    return client_closed()


def carrier_of(span: Span) -> dict[str, str]:
    """W3C headers of a span: "traceparent" and perhaps "tracestate", or neither where there is no trace."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(span))
    return carrier


def context_of(traceparent: str, tracestate: str) -> Context | None:
    """The context of a caller's own headers; None for none."""
    if not traceparent:
        return None
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent, "tracestate": tracestate}, context=Context())


def checked_seconds(name: str, seconds: float) -> float:
    """A duration >= 0, perhaps infinite. Raises InvalidRequest."""
    if not isinstance(seconds, (int, float)) or not seconds >= 0.0:
        raise invalid_field(name, "seconds >= 0")
    return seconds
