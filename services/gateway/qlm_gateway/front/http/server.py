"""The OpenAI API over HTTP: routes, limits and errors, on top of the gateway's service."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from qlm.api.v1.gateway_pb2 import ListModelsRequest, QueueStatusRequest, ResultRequest
from qlm.api.v1.request_pb2 import RequestState, Result
from qlm_core.vocabulary.errors import ConfigError, NotFound, QlmError
from qlm_gateway.front.callers import Callers
from qlm_gateway.front.http.answers import (
    TextOf,
    model_document,
    models_document,
    result_document,
    state_name,
    status_document,
)
from qlm_gateway.front.http.batch_routes import BatchRoutes
from qlm_gateway.front.http.bodies import B, Body, ChatBody, CompletionBody, read_body
from qlm_gateway.front.http.calls import read_call
from qlm_gateway.front.http.completions import Completions, UnaryContext, metadata_of
from qlm_gateway.front.http.errors import NO_NAMES, HttpError
from qlm_gateway.front.http.event_stream import wait_headers
from qlm_gateway.front.http.page.routes import PAGE_PATH, PageRoutes
from qlm_gateway.front.http.responses import error_response, json_response, logged_error
from qlm_gateway.front.http.responses_api.routes import ResponseRoutes
from qlm_gateway.front.http.settings import HttpSettings
from qlm_gateway.front.service import GatewayService
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.text.model_text import ApproximateText, ModelText
from qlm_process.settings import SecuritySettings, is_loopback

KEEP_ALIVE_TICK_S = 1.0
"""Between two checks of streams for silence."""
STOP_GRACE_S = 0.5
"""For answers in progress, once the gateway has drained."""
BACKLOG = 1_024
NO_FORMS: Mapping[str, str] = {}
ADDRESSES = ("listen", "admin_listen")
FREE = ("/health", "/readiness", PAGE_PATH)
"""Paths that want no key."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpFront:
    """Serves `settings.listen` and `settings.admin_listen`, those that are given. `is_serving`: the queue is there, and this process is not
    stopping. `is_draining`: it is stopping. `new_id`: of a call without an idempotency key. `page`: stopped with this. `batches`: None:
    there are no files and batches. Raises ConfigError for an address that may not be listened on. One start and one stop."""

    def __init__(
        self,
        settings: HttpSettings,
        service: GatewayService,
        texts: Mapping[str, ModelText],
        metrics: GatewayMetrics,
        new_id: Callable[[], str],
        callers: Callers,
        security: SecuritySettings,
        page: PageRoutes,
        batches: BatchRoutes | None = None,
        tool_forms: Mapping[str, str] = NO_FORMS,
        *,
        is_serving: Callable[[], bool],
        is_draining: Callable[[], bool],
    ) -> None:
        for name in ADDRESSES:
            if address := getattr(settings, name):
                security.check_listen(f"gateway.http.{name}", address)
        self._settings = settings
        self._callers = callers
        self._security = security
        self._service = service
        self._texts = texts
        self._metrics = metrics
        self._new_id = new_id
        self._is_serving = is_serving
        self._completions = Completions(service, self._text_of, lambda: settings.cancel_on_disconnect and not is_draining())
        self._responses = ResponseRoutes(service, self._completions, settings, self._body, self._text_of, new_id)
        self._page = page
        self._batches = batches
        self._tool_forms = tool_forms
        self._calls = 0
        self._runners: list[web.AppRunner] = []
        self.url = ""
        self.admin_url = ""

    async def start(self) -> None:
        """Binds and serves: `url` and `admin_url` are "http://host:port", or https, from then on. Raises ConfigError where an address
        cannot be bound."""
        listen, admin = self._settings.listen, self._settings.admin_listen
        page = () if admin or not is_loopback(_host_of(listen)) else self._page.routes()
        self.url = await self._serve("listen", [*self._routes(), *page]) if listen else ""
        self.admin_url = await self._serve("admin_listen", self._page.routes()) if admin else ""

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._completion),
            *self._responses.routes(),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model:.+}", self._model),
            web.get("/v1/requests/{id}", self._request),
            web.delete("/v1/requests/{id}", self._delete),
            web.get("/health", self._health),
            web.get("/readiness", self._readiness),
            *(() if self._batches is None else self._batches.routes()),
        ]

    async def _serve(self, name: str, routes: Sequence[web.RouteDef]) -> str:
        """Binds the address of a setting; its URL."""
        address: str = getattr(self._settings, name)
        app = web.Application(middlewares=[self._answer], client_max_size=self._settings.body_bytes_max)
        app.add_routes(routes)
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
        self._runners.append(runner)
        host, _, port = address.rpartition(":")
        try:
            site = web.TCPSite(runner, host.strip("[]"), int(port), backlog=BACKLOG, ssl_context=_tls_of(self._security))
            await site.start()
        except OSError as error:
            raise ConfigError(f"gateway.http.{name}: cannot bind {address}: {error}") from error
        return f"{'https' if self._security.tls_cert_file else 'http'}://{host}:{runner.addresses[0][1]}"

    async def run(self) -> None:
        """Keeps streams alive until it is cancelled."""
        tick_s = min(KEEP_ALIVE_TICK_S, self._settings.keep_alive_s)
        while True:
            await asyncio.sleep(tick_s)
            await self._completions.keep_alive(tick_s)

    async def stop(self) -> None:
        """Takes no more calls and ends those in progress. Safe unstarted and twice."""
        runners, self._runners = self._runners, []
        for runner in runners:
            await runner.cleanup()
        await self._page.stop()

    # Every call -------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Bounds calls, and gives errors their form. Those that are not ours are logged, without the call's body."""
        self._calls += 1
        try:
            response = await self._checked(request, handler)
        except QlmError as error:
            response = error_response(error)
        except web.HTTPException as error:
            response = error_response(HttpError(error.status, error.reason.replace(" ", "_"), error.reason))
            response.headers.update({name: value for name, value in error.headers.items() if name == "Allow"})
        except ConnectionError:  # the client left
            raise
        except Exception as error:
            response = error_response(logged_error(error))
        finally:
            self._calls -= 1
        if self._callers.need_keys and not response.prepared:
            response.headers.update(self._rate_headers(request))
        route = request.match_info.route.resource
        self._metrics.http_answers.labels(route.canonical if route is not None else "none", str(response.status)).inc()
        return response

    async def _checked(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        if self._calls > self._settings.calls_max:
            raise HttpError(503, "calls_full", f"this gateway has {self._settings.calls_max} calls in progress and takes no more")
        if self._callers.need_keys:
            if http.path not in FREE:
                self._callers.caller(metadata_of(http))  # before the body is read
        elif not self._security.no_auth and not is_loopback(_host_of(http.host)):
            # A page of another site that has its name resolve to this machine.
            raise HttpError(403, "wrong_host", "without keys only this machine is served: the header Host names another")
        return await handler(http)

    def _rate_headers(self, http: web.Request) -> dict[str, str]:
        """Headers with the remaining rates of the call's key."""
        try:
            left = self._callers.rates_left(self._callers.caller(metadata_of(http)))
        except QlmError:
            return {}
        names = {"requests_per_min": "requests", "prompt_tokens_per_min": "tokens"}
        return {
            f"x-ratelimit-{what}-{names[name]}": text
            for name, (limit, now, whole_s) in left.items()
            for what, text in (("limit", f"{limit:g}"), ("remaining", f"{math.floor(now)}"), ("reset", f"{whole_s:.3f}s"))
        }

    async def _body(self, http: web.Request, cls: type[B]) -> B:
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
        request_id, names = "", NO_NAMES
        try:
            body = await self._body(http, cls)
            call = read_call(body, http.headers, self._settings, self._new_id(), self._tool_form)
            request_id, names = call.request_id, call.names
            return await self._completions.answer(http, call)
        except QlmError as error:
            return error_response(error, chat=cls is ChatBody, request_id=request_id, names=names)

    def result_document(self, result: Result, chat: bool) -> Mapping[str, Any]:
        """A result as the API has it, for answers of batches."""
        return result_document(result, self._text_of(result.model), chat=chat)

    def _tool_form(self, model: str) -> str:
        return self._tool_forms.get(model, "")

    def _text_of(self, model: str) -> TextOf:
        text = self._texts.get(model) or ApproximateText()
        return lambda token: text.decode([token])

    # The rest ---------------------------------------------------------------------------------------------------------

    async def _models(self, http: web.Request) -> web.StreamResponse:
        return json_response(models_document((await self._service.ListModels(ListModelsRequest(), _context(http))).models))

    async def _model(self, http: web.Request) -> web.StreamResponse:
        name = http.match_info["model"]
        for model in (await self._service.ListModels(ListModelsRequest(), _context(http))).models:
            if model.name == name:
                return json_response(model_document(model))
        raise NotFound(f"model {name[:128]!r} is not served here", reason="UNKNOWN_MODEL")

    async def _request(self, http: web.Request) -> web.StreamResponse:
        request_id = http.match_info["id"]
        status = (await self._service.QueueStatus(QueueStatusRequest(request_id=request_id), _context(http))).request
        result = None
        if status.state == RequestState.REQUEST_STATE_COMPLETED:
            found = (await self._service.Result(ResultRequest(request_id=request_id), _context(http))).result
            result = result_document(found, self._text_of(found.model), chat=True)
        headers = {"x-request-id": request_id}
        if status.HasField("prediction"):
            headers |= wait_headers(status.prediction)
        return json_response(status_document(request_id, status, result), headers=headers)

    async def _delete(self, http: web.Request) -> web.StreamResponse:
        request_id = http.match_info["id"]
        state = await self._service.erase(request_id, _context(http))
        document = {"id": request_id, "object": "qlm.request", "state": state_name(state), "deleted": True}
        return json_response(document, headers={"x-request-id": request_id})

    async def _health(self, http: web.Request) -> web.StreamResponse:
        return json_response({"status": "ok"})

    async def _readiness(self, http: web.Request) -> web.StreamResponse:
        if not self._is_serving():
            raise HttpError(503, "not_ready", "the queue is away, or this gateway is stopping")
        return json_response({"status": "ready"})


def _context(http: web.Request) -> UnaryContext:
    return UnaryContext(metadata_of(http))


def _tls_of(security: SecuritySettings) -> ssl.SSLContext | None:
    """None without TLS. Raises ConfigError for files that cannot be read."""
    if not security.tls_cert_file:
        return None
    authorities = security.tls_client_ca_file
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authorities or None)
        context.load_cert_chain(security.tls_cert_file, security.tls_key_file)
    except OSError as error:
        raise ConfigError(f"security: the files of tls_* cannot be read as PEM: {error.strerror or error}") from None
    if authorities:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _host_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
