"""The OpenAI API over HTTP: routes, limits and errors, on top of the gateway's service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import structlog
from aiohttp import web

from qlm.api.v1.gateway_pb2 import (
    CancelRequest,
    GenerateRequest,
    ListModelsRequest,
    QueueStatusRequest,
    ResultRequest,
    StreamRequest,
    SubmitRequest,
)
from qlm.api.v1.request_pb2 import RequestState, Result
from qlm_core.errors import ConfigError, InternalError, NotFound, QlmError
from qlm_gateway.front.http.answers import (
    TextOf,
    accepted_document,
    choice,
    completion,
    created_of,
    finish_reason,
    logprobs_of,
    model_document,
    models_document,
    state_name,
    status_document,
    usage,
    usage_of,
)
from qlm_gateway.front.http.bodies import Body, ChatBody, CompletionBody, read_body
from qlm_gateway.front.http.calls import Call, read_call
from qlm_gateway.front.http.collected_choice import CollectedChoice
from qlm_gateway.front.http.errors import HttpError, error_body, error_headers, status_of
from qlm_gateway.front.http.event_stream import ESTIMATED_WAIT, EventStream, Metadata, StreamedChoice, answer_headers
from qlm_gateway.front.http.joint_acceptance import JointAcceptance
from qlm_gateway.front.http.settings import HttpSettings, is_loopback
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.model_text import ApproximateText, ModelText
from qlm_gateway.service import CallContext, GatewayService

STOP_GRACE_S = 0.5
"""For answers in progress, once the gateway has drained."""
CANCEL_TIMEOUT_S = 2.0
BACKLOG = 1_024
_TRACE_HEADERS = ("traceparent", "tracestate")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpFront:
    """Serves `settings.listen`. `is_serving`: the queue is there, and this process is not stopping. `is_draining`: it is stopping.
    `new_id`: of a call without an idempotency key. One start and one stop."""

    def __init__(
        self,
        settings: HttpSettings,
        service: GatewayService,
        texts: Mapping[str, ModelText],
        metrics: GatewayMetrics,
        new_id: Callable[[], str],
        *,
        is_serving: Callable[[], bool],
        is_draining: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._service = service
        self._texts = texts
        self._metrics = metrics
        self._new_id = new_id
        self._is_serving = is_serving
        self._is_draining = is_draining
        self._streams: set[EventStream] = set()
        self._calls = 0
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """ "http://host:port"; empty before the start."""
        return f"http://{self._settings.listen.rpartition(':')[0]}:{self._port}" if self._port else ""

    async def start(self) -> None:
        """Binds and serves. Raises ConfigError where the address cannot be bound."""
        app = web.Application(middlewares=[self._answer], client_max_size=self._settings.body_bytes_max)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model}", self._model),
                web.get("/v1/requests/{id}", self._request),
                web.delete("/v1/requests/{id}", self._cancel),
                web.get("/health", self._health),
                web.get("/readiness", self._readiness),
            ]
        )
        runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,
            shutdown_timeout=STOP_GRACE_S,
            max_line_size=self._settings.header_bytes_max,
            max_field_size=self._settings.header_bytes_max,
        )
        await runner.setup()
        self._runner = runner
        try:
            await web.TCPSite(runner, self._settings.host, self._settings.port, backlog=BACKLOG).start()
        except OSError as error:
            raise ConfigError(f"gateway.http.listen: cannot bind {self._settings.listen}: {error}") from error
        self._port = runner.addresses[0][1]

    async def run(self) -> None:
        """Keeps streams alive until it is cancelled."""
        while True:
            await asyncio.sleep(self._settings.keep_alive_s)
            for stream in tuple(self._streams):
                await stream.keep_alive()

    async def stop(self) -> None:
        """Takes no more calls and ends those in progress. Safe unstarted and twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    # Every call -------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Bounds calls, and gives errors their form. Those that are not ours are logged, without the call's body."""
        self._calls += 1
        try:
            response = await self._checked(request, handler)
        except QlmError as error:
            response = _error(error)
        except web.HTTPException as error:
            response = _error(HttpError(error.status, error.reason.replace(" ", "_"), error.reason))
            response.headers.update({name: value for name, value in error.headers.items() if name == "Allow"})
        except ConnectionError:  # the client left
            raise
        except Exception as error:
            response = _error(_logged(error))
        finally:
            self._calls -= 1
        route = request.match_info.route.resource
        self._metrics.http_answers.labels(route.canonical if route is not None else "none", str(response.status)).inc()
        return response

    async def _checked(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        if self._calls > self._settings.calls_max:
            raise HttpError(503, "calls_full", f"this gateway has {self._settings.calls_max} calls in progress and takes no more")
        if not self._settings.no_auth and not is_loopback(_host_of(http.host)):
            # A page of another site that has its name resolve to this machine.
            raise HttpError(403, "wrong_host", "without keys only this machine is served: the header Host names another")
        return await handler(http)

    async def _body(self, http: web.Request, cls: type[Body]) -> Body:
        if http.content_type != "application/json":  # another site's page may send other types without asking
            raise HttpError(415, "unsupported_media_type", "Content-Type must be application/json")
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                body = await http.read()
        except TimeoutError:
            raise HttpError(408, "body_timeout", "the body did not arrive in time") from None
        return read_body(cls, body, refuse_unknown=self._settings.unknown_fields == "refuse")

    # Completions ------------------------------------------------------------------------------------------------------

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._complete(http, ChatBody)

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        return await self._complete(http, CompletionBody)

    async def _complete(self, http: web.Request, cls: type[Body]) -> web.StreamResponse:
        chat = cls is ChatBody
        request_id = ""
        try:
            body = await self._body(http, cls)
            call = read_call(body, http.headers, self._settings, self._new_id())
            request_id = call.request_id
            if call.enqueue:
                return await self._enqueue(http, call)
            return await (self._stream(http, call) if call.stream else self._collect(http, call))
        except QlmError as error:
            return _error(error, chat=chat, request_id=request_id)

    async def _enqueue(self, http: web.Request, call: Call) -> web.StreamResponse:
        submitted = await self._service.Submit(SubmitRequest(request=call.requests[0]), _Plain(_metadata(http)))
        accepted = submitted.accepted
        headers = {"Location": f"/v1/requests/{quote(call.request_id, safe='')}", **answer_headers(call, [accepted])}
        return _json(accepted_document(accepted, call.model), status=202, headers=headers)

    async def _collect(self, http: web.Request, call: Call) -> web.StreamResponse:
        metadata, acceptance = _metadata(http), JointAcceptance(len(call.requests))
        choices = [CollectedChoice(index, metadata, acceptance) for index in range(len(call.requests))]
        try:
            await self._generate(call, choices, acceptance)
        except asyncio.CancelledError:
            if self._settings.cancel_on_disconnect and not self._is_draining():
                await self._withdraw(call)
            raise
        text_of = self._text_of(call.model)
        document = completion(
            request_id=call.request_id,
            created=created_of(acceptance.accepted[0]),
            model=call.model,
            tier=call.tier,
            choices=[each.document(text_of, chat=call.chat) for each in choices],
            usage=usage_of(call, [each.result.usage for each in choices if each.result is not None]),
            chat=call.chat,
        )
        return _json(document, headers=answer_headers(call, acceptance.accepted))

    async def _stream(self, http: web.Request, call: Call) -> web.StreamResponse:
        stream = EventStream(http, call, self._text_of(call.model))
        choices = stream.choices(_metadata(http))
        self._streams.add(stream)
        try:
            if call.resume is None:
                await self._generate(call, choices, stream.acceptance)
            else:
                await self._resume(call, stream, choices)
            await stream.end([each.usage for each in choices])
        except ConnectionError:
            pass  # the client left; the request goes on
        except Exception as error:
            if not stream.is_open:
                raise
            await stream.fail(error if isinstance(error, QlmError) else _logged(error))
        finally:
            self._streams.discard(stream)
        return stream.response

    async def _generate(self, call: Call, choices: Sequence[CallContext], acceptance: JointAcceptance) -> None:
        """All choices side by side. Raises the first error. Where one was refused, the others are cancelled, unless the client named the
        call: then it may send it again."""
        try:
            await _side_by_side(
                [
                    acceptance.run(self._service.Generate(GenerateRequest(request=each), to))
                    for each, to in zip(call.requests, choices, strict=True)
                ]
            )
        except QlmError:
            if acceptance.refusal is not None and acceptance.accepted and not call.keyed:
                await self._withdraw(call)
            raise

    async def _resume(self, call: Call, stream: EventStream, choices: Sequence[StreamedChoice]) -> None:
        """Goes on behind the event that the client has. One that is not known is refused before the answer's head."""
        assert call.resume is not None, "the call names an event"
        for request_id in call.ids:
            await self._service.Result(ResultRequest(request_id=request_id), choices[0])
        await stream.open(call.resume.created)
        await _side_by_side(
            [
                self._service.Stream(StreamRequest(request_id=request_id, offset=offset), to)
                for request_id, offset, to in zip(call.ids, call.resume.offsets, choices, strict=True)
            ]
        )

    async def _withdraw(self, call: Call) -> None:
        """Cancels those that were accepted, as far as the queue answers."""
        for name in call.ids:
            try:
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    await self._service.Cancel(CancelRequest(request_id=name), _Plain())
            except NotFound:
                pass  # refused
            except (QlmError, TimeoutError) as error:
                structlog.get_logger().warning("not_cancelled", request_id=name, error=str(error))

    def _text_of(self, model: str) -> TextOf:
        text = self._texts.get(model) or ApproximateText()
        return lambda token: text.decode([token])

    # The rest ---------------------------------------------------------------------------------------------------------

    async def _models(self, http: web.Request) -> web.StreamResponse:
        return _json(models_document((await self._service.ListModels(ListModelsRequest(), _Plain())).models))

    async def _model(self, http: web.Request) -> web.StreamResponse:
        name = http.match_info["model"]
        for model in (await self._service.ListModels(ListModelsRequest(), _Plain())).models:
            if model.name == name:
                return _json(model_document(model))
        raise NotFound(f"model {name[:128]!r} is not served here", reason="UNKNOWN_MODEL")

    async def _request(self, http: web.Request) -> web.StreamResponse:
        request_id = http.match_info["id"]
        status = (await self._service.QueueStatus(QueueStatusRequest(request_id=request_id), _Plain())).request
        result = None
        if status.state == RequestState.REQUEST_STATE_COMPLETED:
            result = self._result((await self._service.Result(ResultRequest(request_id=request_id), _Plain())).result)
        headers = {"x-request-id": request_id}
        if status.HasField("prediction"):
            headers[ESTIMATED_WAIT] = f"{status.prediction.wait_p50_s:.3f}"
        return _json(status_document(request_id, status, result), headers=headers)

    def _result(self, result: Result) -> dict[str, Any]:
        """As a chat completion."""
        logprobs = None
        if result.HasField("logprobs"):
            logprobs = logprobs_of(result.logprobs, result.output_token_ids, self._text_of(result.model), chat=True)
        return completion(
            request_id=result.request_id,
            created=int(result.timing.accepted_s),
            model=result.model,
            tier="default",
            choices=[choice(0, result.output_text, finish_reason(result), logprobs, chat=True)],
            usage=usage(result.usage.prompt_tokens, result.usage.output_tokens),
            chat=True,
        )

    async def _cancel(self, http: web.Request) -> web.StreamResponse:
        request_id = http.match_info["id"]
        answer = await self._service.Cancel(CancelRequest(request_id=request_id), _Plain())
        document = {"id": request_id, "object": "qlm.request", "state": state_name(answer.state)}
        return _json(document, headers={"x-request-id": request_id})

    async def _health(self, http: web.Request) -> web.StreamResponse:
        return _json({"status": "ok"})

    async def _readiness(self, http: web.Request) -> web.StreamResponse:
        if not self._is_serving():
            raise HttpError(503, "not_ready", "the queue is away, or this gateway is stopping")
        return _json({"status": "ready"})


class _Plain:
    """The context of a call that is answered with one message."""

    def __init__(self, metadata: Metadata = ()) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    async def write(self, message: object) -> None:
        raise AssertionError("the call streams nothing")


async def _side_by_side(calls: Sequence[Awaitable[None]]) -> None:
    """Raises the first error, with the others cancelled."""
    if len(calls) == 1:
        await calls[0]
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(_awaited(call))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _awaited(call: Awaitable[None]) -> None:
    await call


def _metadata(http: web.Request) -> Metadata:
    return [(name, http.headers[name]) for name in _TRACE_HEADERS if name in http.headers]


def _host_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _json(document: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=json.dumps(document).encode(), status=status, headers=headers, content_type="application/json")


def _error(error: QlmError, *, chat: bool = False, request_id: str = "") -> web.Response:
    headers = {**error_headers(error), **({"x-request-id": request_id} if request_id else {})}
    return web.Response(body=error_body(error, chat=chat), status=status_of(error), headers=headers, content_type="application/json")


def _logged(error: Exception) -> InternalError:
    structlog.get_logger().error("http_call_failed", exc_info=error)
    return InternalError("the call failed; the gateway's log says why")
