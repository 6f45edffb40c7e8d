"""Shared parts of a client's calls: connections, deadlines, retries and trace context."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracerProvider, Span, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from qlm.api.v1.gateway_pb2_grpc import GatewayStub
from qlm.credentials import Credentials
from qlm.errors import ConfigError, InternalError, QlmError
from qlm.retry import Backoff
from qlm.wire_errors import from_rpc_error
from qlm_core.vocabulary.errors import invalid_field

if TYPE_CHECKING:
    from qlm.api.v1.gateway_pb2_grpc import GatewayAsyncStub  # known to the type stubs alone

Message = TypeVar("Message")
Answer = TypeVar("Answer")
Metadata = tuple[tuple[str, str], ...]

REQUEST_SPAN = "qlm.client.request"
MESSAGE_BYTES_MAX = 64 << 20
KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0
RECONNECT_MAX_S = 1.0


class Link:
    """One channel an address, round robin, moved on by failures. `random`: in [0, 1), for jitter. Every call has a deadline; attempts
    without progress are bounded."""

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
        if not addresses or not all(addresses):
            raise ConfigError('addresses: at least one "host:port"')
        self.call_timeout_s = call_timeout_s
        self.credentials = credentials
        self._addresses = tuple(addresses)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0
        self._closed = False
        self._pid = os.getpid()
        self._attempts_max = reconnect_attempts_max
        self._backoff_max_s = reconnect_backoff_max_s
        self._random = random
        self._tracer = (tracer_provider or NoOpTracerProvider()).get_tracer("qlm")

    @property
    def address(self) -> str:
        """The gateway that the next call goes to."""
        return self._addresses[self._current]

    def stub(self) -> GatewayAsyncStub:
        """The gateway at `address`; connects when it is used. Raises InternalError after `close`, and in a forked child."""
        check_process(self._pid)
        if self._closed:
            raise client_closed()
        channel = self._channels.get(self.address)
        if channel is None:
            channel = self._channels[self.address] = self.credentials.aio_channel(self.address, _OPTIONS)
        return GatewayStub(channel)

    def move_on(self, failed_address: str) -> None:
        """The gateway there did not answer: the next call goes to another. Nothing where somebody has moved on already."""
        if self.address == failed_address:
            self._current = (self._current + 1) % len(self._addresses)

    def new_backoff(self) -> Backoff:
        return Backoff(attempts_max=self._attempts_max, max_s=self._backoff_max_s, addresses=len(self._addresses), random=self._random)

    async def close(self) -> None:
        """Safe twice."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

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


def check_process(pid: int) -> None:
    """Raises InternalError in a child of the process where a client was made: neither its thread nor its connections live there."""
    if os.getpid() != pid:
        raise InternalError("the client was made in another process: make one in each process, after the fork")


def client_closed() -> InternalError:
    """Somebody uses a client after its `close`."""
    return InternalError("the client is closed")


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


RECONNECTING = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", round(RECONNECT_MAX_S * 1000)),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
"""Options of a channel to a process that may be started again: it is found soon, and its caller decides what is repeated."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A stream may be silent for as long as its request waits: probes distinguish a dead gateway from a silent one.
    ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
    *RECONNECTING,
)
