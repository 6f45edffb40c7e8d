"""The asynchronous client of QLM."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypedDict, TypeVar, Unpack
from uuid import uuid4

from opentelemetry.trace import Span, Status, StatusCode, TracerProvider

from qlm import messages
from qlm.api.v1 import gateway_pb2, request_pb2
from qlm.credentials import Credentials, credentials_of
from qlm.errors import ConfigError, QlmError
from qlm.link import Link, Metadata, carrier_of, checked_seconds, context_of
from qlm.messages import Prompt
from qlm.token_stream import TokenStream
from qlm.values import Accepted, ModelInfo, Outlook, QueueStatus, RequestPage, RequestState, Result, Slo
from qlm_core.vocabulary.errors import invalid_field

Named = TypeVar("Named", gateway_pb2.ResultRequest, gateway_pb2.CancelRequest, gateway_pb2.QueueStatusRequest, gateway_pb2.StreamRequest)

WAIT_SLICE_S = 20.0
"""Longest wait of one call; a longer one takes several."""


class RequestOptions(TypedDict, total=False):
    """Options of a request beside model and prompt (see request.proto). `tools`, `chat_variables`: `variables_json`
    of a chat. `slo_s`: short for `slo=Slo.completion(slo_s)`. `traceparent`,
    `tracestate`: the W3C context of the caller, by default that of the current span."""

    slo_s: float | None
    slo: Slo | None
    max_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int
    min_p: float
    stop: str | Sequence[str]
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    ignore_eos: bool
    logprobs: int | None
    json_schema: str | None
    regex: str | None
    request_id: str | None
    expire_after_s: float | None
    expected_output_tokens: int
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_variables: Mapping[str, Any] | None
    control_tokens_in_text: bool
    tenant: str | None
    application: str | None
    traceparent: str
    tracestate: str


class AsyncClient:
    """Speaks to any gateway of a queue; use it as an asynchronous context manager, on one event loop.

    Every call has a deadline (`call_timeout_s` for each attempt) and goes on at another address where one fails; at most
    `reconnect_attempts_max` attempts without progress, with pauses up to `reconnect_backoff_max_s`. All errors are `qlm.errors.QlmError`s.
    `tenant`: "" is the API key's, without keys "default". `credentials`: by default those of the environment (`credentials_of`).
    A request without an id is given one here, so that an attempt that is repeated is the same request.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        tenant: str = "",
        application: str = "",
        call_timeout_s: float = 10.0,
        reconnect_attempts_max: int = 20,
        reconnect_backoff_max_s: float = 2.0,
        tracer_provider: TracerProvider | None = None,
        credentials: Credentials | None = None,
        new_request_id: Callable[[], str] = lambda: uuid4().hex,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if not call_timeout_s > 0.0 or reconnect_attempts_max < 0 or not reconnect_backoff_max_s > 0.0:
            raise ConfigError("call_timeout_s, reconnect_backoff_max_s: > 0; reconnect_attempts_max: >= 0")
        self._tenant = tenant
        self._application = application
        self._new_request_id = new_request_id
        self._link = Link(
            [addresses] if isinstance(addresses, str) else list(addresses),
            call_timeout_s=call_timeout_s,
            reconnect_attempts_max=reconnect_attempts_max,
            reconnect_backoff_max_s=reconnect_backoff_max_s,
            tracer_provider=tracer_provider,
            credentials=credentials or credentials_of(),
            random=jitter,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections; open streams end. Requests go on. Safe twice."""
        await self._link.close()

    async def submit(self, model: str, prompt: Prompt, **options: Unpack[RequestOptions]) -> Accepted:
        """Puts a request into the queue and returns when it is durable there. Raises InvalidRequest, NotFound (UNKNOWN_MODEL),
        RequestIdConflict, QueueFull (see `retry_after_s`), Unavailable."""
        request, metadata, span = self._request(model, prompt, options)
        try:
            message = gateway_pb2.SubmitRequest(request=request)
            response = await self._link.call(lambda stub: stub.Submit, message, metadata=metadata)
        except QlmError as error:
            span.set_status(Status(StatusCode.ERROR, error.reason))
            raise
        finally:
            span.end()
        return messages.accepted_value(response.accepted)

    def generate(
        self,
        model: str,
        prompt: Prompt,
        *,
        timeout_s: float = float("inf"),
        outlook_every_s: float = 0.0,
        on_outlook: Callable[[Outlook], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> TokenStream:
        """A request and the stream of its output. It is sent when the stream is first waited for; errors as in `submit` and `TokenStream`.
        `timeout_s`: how long to wait for all of it. `outlook_every_s`: seconds (1 to 3,600; 0: never) between two predictions while it
        waits, which `prediction` of the stream holds; `on_outlook` is called with each, and must be quick."""
        checked_seconds("timeout_s", timeout_s)
        request, metadata, span = self._request(model, prompt, options)
        return TokenStream(
            self._link,
            tenant=request.tenant,
            request_id=request.request_id,
            timeout_s=timeout_s,
            outlook_every_s=outlook_every_s,
            on_outlook=on_outlook,
            request=request,
            metadata=metadata,
            span=span,
        )

    def stream(
        self,
        request_id: str,
        offset: int = 0,
        *,
        tenant: str | None = None,
        timeout_s: float = float("inf"),
        outlook_every_s: float = 0.0,
        on_outlook: Callable[[Outlook], None] | None = None,
    ) -> TokenStream:
        """The output of an accepted request from token `offset` on; outlooks as in `generate`. Iteration raises NotFound, and
        OffsetOutOfRange beyond the output."""
        checked_seconds("timeout_s", timeout_s)
        self._named(gateway_pb2.StreamRequest(), request_id, tenant)
        if not 0 <= offset < 1 << 32:
            raise invalid_field("offset", "from 0 to 2**32 - 1", offset)
        return TokenStream(
            self._link,
            tenant=tenant or self._tenant,
            request_id=request_id,
            offset=offset,
            timeout_s=timeout_s,
            outlook_every_s=outlook_every_s,
            on_outlook=on_outlook,
        )

    async def result(self, request_id: str, wait_s: float = 60.0, *, tenant: str | None = None) -> Result | None:
        """The end of a request with its output, waiting up to `wait_s` for it; None where it has not ended by then. Raises NotFound."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + checked_seconds("wait_s", wait_s)
        while True:
            left_s = max(0.0, deadline_s - clock())
            slice_s = min(left_s, WAIT_SLICE_S)
            message = self._named(gateway_pb2.ResultRequest(wait_s=slice_s), request_id, tenant)
            response = await self._link.call(lambda stub: stub.Result, message, extra_s=slice_s)
            if response.HasField("result"):
                return messages.result_value(response.result)
            if clock() >= deadline_s:
                return None

    async def cancel(self, request_id: str, *, tenant: str | None = None) -> RequestState:
        """Ends a request as CANCELLED, unless it has ended; returns its terminal state. Raises NotFound."""
        message = self._named(gateway_pb2.CancelRequest(), request_id, tenant)
        response = await self._link.call(lambda stub: stub.Cancel, message)
        return messages.STATES[response.state]

    async def models(self) -> tuple[ModelInfo, ...]:
        """The served models."""
        response = await self._link.call(lambda stub: stub.ListModels, gateway_pb2.ListModelsRequest())
        return tuple(messages.model_value(model) for model in response.models)

    async def status(self, request_id: str | None = None, *, tenant: str | None = None) -> QueueStatus:
        """The queue now, and one request in it: its place, the requests before it and the expected wait. Raises NotFound."""
        message = gateway_pb2.QueueStatusRequest()
        if request_id is not None:
            self._named(message, request_id, tenant)
        response = await self._link.call(lambda stub: stub.QueueStatus, message)
        return messages.queue_status_value(response)

    async def requests(
        self, *, tenant: str = "", model: str = "", state: RequestState | None = None, after: str = "", limit: int = 100
    ) -> RequestPage:
        """A page of the requests that have not ended, at most `limit` (1 to 500), behind the queue id `after` ("": from the first): those
        of a tenant, for a model, in a state, or all. It reads at most 5,000 requests of the queue, so with such a choice a page may be
        empty where others follow (`next_after`). Raises InvalidRequest."""
        message = messages.filled(
            gateway_pb2.ListRequestsRequest(),
            tenant=tenant,
            model=model,
            state=None if state is None else messages.STATE_NUMBERS[state],
            after=after,
            limit=limit,
        )
        response = await self._link.call(lambda stub: stub.ListRequests, message)
        return messages.request_page_value(response)

    async def pause(self, *, model: str | None = None, tenant: str | None = None) -> bool:
        """Requests for a model, or of a tenant, wait from now on, also new ones; running ones go on. False where that is so already. Raises
        NotFound for a model that is not served, QueueFull where as much is paused as may be."""
        message = messages.filled(gateway_pb2.PauseRequest(), model=model, tenant=tenant)
        return (await self._link.call(lambda stub: stub.Pause, message)).changed

    async def resume(self, *, model: str | None = None, tenant: str | None = None) -> bool:
        """Ends a pause; False where there is none."""
        message = messages.filled(gateway_pb2.PauseRequest(), model=model, tenant=tenant)
        return (await self._link.call(lambda stub: stub.Resume, message)).changed

    def _named(self, message: Named, request_id: str, tenant: str | None) -> Named:
        """With the key of a request. Raises InvalidRequest."""
        return messages.filled(message, tenant=tenant or self._tenant, request_id=request_id)

    def _request(self, model: str, prompt: Prompt, options: RequestOptions) -> tuple[request_pb2.Request, Metadata, Span]:
        unknown = options.keys() - RequestOptions.__annotations__.keys()
        if unknown:
            raise invalid_field(min(unknown), f"absent: options are {', '.join(RequestOptions.__annotations__)}")
        slo, slo_s = options.get("slo"), options.get("slo_s")
        if slo is not None and slo_s is not None:
            raise invalid_field("slo_s", "absent beside slo")
        request = messages.request_message(
            model,
            prompt,
            {name: value for name, value in options.items() if name not in _NOT_SAMPLING},
            slo=Slo.completion(slo_s) if slo_s is not None else slo,
            tenant=options.get("tenant") or self._tenant,
            application=options.get("application") or self._application,
            request_id=options.get("request_id") or self._new_request_id(),
            expire_after_s=options.get("expire_after_s"),
            **{name: value for name, value in options.items() if name in _OF_REQUEST},  # type: ignore[arg-type]
        )
        parent = context_of(options.get("traceparent", ""), options.get("tracestate", ""))
        span = self._link.start_span(model, request.request_id, request.tenant, parent)
        carrier = carrier_of(span)
        request.trace.traceparent = carrier.get("traceparent", "")
        request.trace.tracestate = carrier.get("tracestate", "")
        return request, tuple(carrier.items()), span


_OF_REQUEST = frozenset({"expected_output_tokens", "continue_final_message", "tools", "chat_variables", "control_tokens_in_text"})
_NOT_SAMPLING = _OF_REQUEST | {"slo_s", "slo", "request_id", "expire_after_s", "tenant", "application", "traceparent", "tracestate"}
