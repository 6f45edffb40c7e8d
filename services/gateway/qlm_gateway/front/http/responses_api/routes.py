"""The routes of the Responses API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from qlm.api.v1.gateway_pb2 import CancelRequest, QueueStatusRequest, ResultRequest
from qlm.api.v1.request_pb2 import RequestState, Usage
from qlm_core.vocabulary.errors import QlmError, invalid_field
from qlm_gateway.front.http.answers import TextOf, created_of, result_document, state_name, usage_of
from qlm_gateway.front.http.calls import LAST_EVENT_ID, Call, read_call
from qlm_gateway.front.http.completions import Completions, UnaryContext, metadata_of
from qlm_gateway.front.http.event_stream import EventStream
from qlm_gateway.front.http.responses import error_response, json_response
from qlm_gateway.front.http.responses_api.body import PARAMETERS, ResponsesBody
from qlm_gateway.front.http.responses_api.documents import ResponseForm, of_completion, response_document
from qlm_gateway.front.http.settings import HttpSettings
from qlm_gateway.front.service import GatewayService

STATUS = {"accepted": "queued", "placed": "queued", "running": "in_progress", "cancelled": "cancelled"}
"""By state of a request that has not completed; of any other "failed"."""


class ResponseRoutes:
    """`read`: a checked body. `text_of`, `new_id`: as of the front."""

    def __init__(
        self,
        service: GatewayService,
        completions: Completions,
        settings: HttpSettings,
        read: Callable[[web.Request, type[ResponsesBody]], Awaitable[ResponsesBody]],
        text_of: Callable[[str], TextOf],
        new_id: Callable[[], str],
    ) -> None:
        self._service, self._completions, self._settings = service, completions, settings
        self._read, self._text_of, self._new_id = read, text_of, new_id

    def routes(self) -> Sequence[web.RouteDef]:
        return (
            web.post("/v1/responses", self._create),
            web.get("/v1/responses/{id}", self._retrieve),
            web.delete("/v1/responses/{id}", self._delete),
            web.post("/v1/responses/{id}/cancel", self._cancel),
        )

    async def _create(self, http: web.Request) -> web.StreamResponse:
        request_id, names = "", PARAMETERS
        try:
            body = await self._read(http, ResponsesBody)
            call = read_call(body.chat(), http.headers, self._settings, self._new_id())
            request_id, names = call.request_id, {**PARAMETERS, **call.names}
            if call.resume is not None:
                raise invalid_field(LAST_EVENT_ID, "absent: streams of responses have no ids")
            return await self._answer(http, call, body)
        except QlmError as error:
            return error_response(error, chat=True, request_id=request_id, names=names)

    async def _answer(self, http: web.Request, call: Call, body: ResponsesBody) -> web.StreamResponse:
        if call.enqueue or body.background:
            accepted, headers = await self._completions.submit(http, call)
            document = response_document(call.request_id, created_of(accepted), call.model, "queued", tier=call.tier, body=body)
            return json_response(document, headers=headers)
        if call.stream:
            return await self._completions.stream(http, call, ResponseStream(http, call, self._text_of(call.model), body))
        completion, headers = await self._completions.collect(http, call)
        return json_response(of_completion(completion, body), headers=headers)

    async def _retrieve(self, http: web.Request) -> web.StreamResponse:
        request_id, context = http.match_info["id"], UnaryContext(metadata_of(http))
        status = (await self._service.QueueStatus(QueueStatusRequest(request_id=request_id), context)).request
        if status.state == RequestState.REQUEST_STATE_COMPLETED:
            found = (await self._service.Result(ResultRequest(request_id=request_id), context)).result
            return json_response(of_completion(result_document(found, self._text_of(found.model), chat=True), None))
        now = STATUS.get(state_name(status.state), "failed")
        return json_response(response_document(request_id, int(status.accepted_s), status.model, now, error=status.error.message))

    async def _cancel(self, http: web.Request) -> web.StreamResponse:
        await self._service.Cancel(CancelRequest(request_id=http.match_info["id"]), UnaryContext(metadata_of(http)))
        return await self._retrieve(http)

    async def _delete(self, http: web.Request) -> web.StreamResponse:
        await self._service.erase(http.match_info["id"], UnaryContext(metadata_of(http)))
        return json_response({"id": http.match_info["id"], "object": "response", "deleted": True})


class ResponseStream(EventStream):
    """The stream of a response: typed events without ids."""

    def __init__(self, http: web.Request, call: Call, text_of: TextOf, body: ResponsesBody) -> None:
        super().__init__(http, call, text_of)
        self._body = body
        self._events: ResponseForm

    def _form(self, created: int) -> ResponseForm:
        self._events = ResponseForm(self._call, created, self._body)
        return self._events

    async def open(self, created: int) -> None:
        await super().open(created)
        await self._write(self._events.begin().encode())

    async def send(self, index: int, chunks: Sequence[tuple[str, int]]) -> None:
        await self._write("".join(events for events, _ in chunks).encode())

    async def end(self, usages: Sequence[Usage]) -> None:
        await self._write(self._events.usage(usage_of(self._call, usages)).encode())
        await self._response.write_eof()

    async def fail(self, error: QlmError) -> None:
        await self._write(self._events.failure(error).encode())
        await self._response.write_eof()
