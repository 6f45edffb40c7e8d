"""The synchronous client: the asynchronous one on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar, Unpack

from opentelemetry.trace import TracerProvider

from qlm.async_client import AsyncClient, RequestOptions
from qlm.credentials import Credentials
from qlm.errors import InternalError
from qlm.link import check_process, client_closed
from qlm.messages import Prompt
from qlm.token_stream import TokenStream
from qlm.values import Accepted, ModelInfo, Outlook, Prediction, QueueStatus, RequestPage, RequestState, Result, TokenChunk

Answer = TypeVar("Answer")


class Client:
    """As `AsyncClient`, call for call; use it as a context manager, from any thread of the process that made it."""

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
    ) -> None:
        self._client = AsyncClient(
            addresses,
            tenant=tenant,
            application=application,
            call_timeout_s=call_timeout_s,
            reconnect_attempts_max=reconnect_attempts_max,
            reconnect_backoff_max_s=reconnect_backoff_max_s,
            tracer_provider=tracer_provider,
            credentials=credentials,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="qlm-client", daemon=True)
        self._thread.start()
        self._closed = False
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections and ends the thread. Safe twice."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._wait(self._client.close())
        self._wait(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(self, model: str, prompt: Prompt, **options: Unpack[RequestOptions]) -> Accepted:
        """See `AsyncClient.submit`."""
        return self._run(self._client.submit(model, prompt, **options))

    def generate(
        self,
        model: str,
        prompt: Prompt,
        *,
        timeout_s: float = float("inf"),
        outlook_every_s: float = 0.0,
        on_outlook: Callable[[Outlook], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> SyncTokenStream:
        """See `AsyncClient.generate`. `on_outlook` is called in the client's own thread, while the stream is waited for."""

        async def start() -> TokenStream:
            return self._client.generate(
                model, prompt, timeout_s=timeout_s, outlook_every_s=outlook_every_s, on_outlook=on_outlook, **options
            )

        return SyncTokenStream(self, self._run(start()))

    def stream(
        self,
        request_id: str,
        offset: int = 0,
        *,
        tenant: str | None = None,
        timeout_s: float = float("inf"),
        outlook_every_s: float = 0.0,
        on_outlook: Callable[[Outlook], None] | None = None,
    ) -> SyncTokenStream:
        """See `AsyncClient.stream`, and `generate`."""

        async def start() -> TokenStream:
            return self._client.stream(
                request_id, offset, tenant=tenant, timeout_s=timeout_s, outlook_every_s=outlook_every_s, on_outlook=on_outlook
            )

        return SyncTokenStream(self, self._run(start()))

    def result(self, request_id: str, wait_s: float = 60.0, *, tenant: str | None = None) -> Result | None:
        """See `AsyncClient.result`."""
        return self._run(self._client.result(request_id, wait_s, tenant=tenant))

    def cancel(self, request_id: str, *, tenant: str | None = None) -> RequestState:
        """See `AsyncClient.cancel`."""
        return self._run(self._client.cancel(request_id, tenant=tenant))

    def models(self) -> tuple[ModelInfo, ...]:
        """See `AsyncClient.models`."""
        return self._run(self._client.models())

    def status(self, request_id: str | None = None, *, tenant: str | None = None) -> QueueStatus:
        """See `AsyncClient.status`."""
        return self._run(self._client.status(request_id, tenant=tenant))

    def requests(
        self, *, tenant: str = "", model: str = "", state: RequestState | None = None, after: str = "", limit: int = 100
    ) -> RequestPage:
        """See `AsyncClient.requests`."""
        return self._run(self._client.requests(tenant=tenant, model=model, state=state, after=after, limit=limit))

    def pause(self, *, model: str | None = None, tenant: str | None = None) -> bool:
        """See `AsyncClient.pause`."""
        return self._run(self._client.pause(model=model, tenant=tenant))

    def resume(self, *, model: str | None = None, tenant: str | None = None) -> bool:
        """See `AsyncClient.resume`."""
        return self._run(self._client.resume(model=model, tenant=tenant))

    def _run(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        """The coroutine's answer. Interrupted (Ctrl-C), it is cancelled. Raises InternalError after `close`, and in a forked child."""
        try:
            check_process(self._pid)
            if self._closed:
                raise client_closed()
        except InternalError:
            coroutine.close()
            raise
        return self._wait(coroutine)

    def _wait(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class SyncTokenStream:
    """See `TokenStream`: iterate over it once."""

    def __init__(self, client: Client, stream: TokenStream) -> None:
        self._client = client
        self._stream = stream

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def offset(self) -> int:
        """The first token that has not been given yet."""
        return self._stream.offset

    @property
    def accepted(self) -> Accepted | None:
        return self._stream.accepted

    @property
    def prediction(self) -> Prediction | None:
        """See `TokenStream.prediction`."""
        return self._stream.prediction

    @property
    def result(self) -> Result | None:
        """Set when the iteration has ended."""
        return self._stream.result

    @property
    def address(self) -> str:
        """The gateway that sends the output, or sent the last; "" before the first call."""
        return self._stream.address

    @property
    def resumes(self) -> int:
        """How often it resumed, after acceptance, when a connection had ended."""
        return self._stream.resumes

    def wait_accepted(self) -> Accepted:
        """See `TokenStream.wait_accepted`."""
        return self._client._run(self._stream.wait_accepted())

    def cancel(self) -> RequestState:
        """See `TokenStream.cancel`."""
        return self._client._run(self._stream.cancel())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenChunk:
        try:
            return self._client._run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Breaks the call off; the request goes on. Safe twice, after the client's end and in a forked child."""
        if not self._client._closed and os.getpid() == self._client._pid:
            self._client._run(self._stream.aclose())
