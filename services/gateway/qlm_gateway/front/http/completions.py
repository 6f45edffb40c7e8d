"""Chats and completions: waited for, streamed, resumed or enqueued, by the calls of the gateway's service."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import structlog
from aiohttp import web

from qlm.api.v1.gateway_pb2 import Accepted, CancelRequest, GenerateRequest, ResultRequest, StreamRequest, SubmitRequest
from qlm_core.vocabulary.errors import CallDeadlineExceeded, NotFound, QlmError
from qlm_gateway.front.http.answers import TextOf, accepted_document, completion, created_of, usage_of
from qlm_gateway.front.http.calls import MODE, Call
from qlm_gateway.front.http.collected_choice import CollectedChoice
from qlm_gateway.front.http.errors import STILL_WAITING, HttpError
from qlm_gateway.front.http.event_stream import EventStream, Metadata, StreamedChoice, answer_headers
from qlm_gateway.front.http.joint_acceptance import JointAcceptance
from qlm_gateway.front.http.responses import json_response, logged_error
from qlm_gateway.front.service import CallContext, GatewayService
from qlm_process.identity.keys import AUTHORIZATION

CANCEL_TIMEOUT_S = 2.0
READ_TIMEOUT_SHARE = 0.9
"""Part of a client's read timeout within which it has an answer; the rest is for the network."""
OUTLOOK_EVERY_MIN_S = 1.0
_PASSED_ON = (AUTHORIZATION, "traceparent", "tracestate")
"""Headers that become metadata of the service's calls."""


class Completions:
    """Answers of all kinds. `text_of`: the text of a model's tokens, by its name. `cancels_abandoned`: a client that leaves while it waits
    cancels its requests."""

    def __init__(self, service: GatewayService, text_of: Callable[[str], TextOf], cancels_abandoned: Callable[[], bool]) -> None:
        self._service = service
        self._text_of = text_of
        self._cancels_abandoned = cancels_abandoned
        self._streams: set[EventStream] = set()

    async def answer(self, http: web.Request, call: Call) -> web.StreamResponse:
        """Raises QlmError for what is refused or fails before the head of an answer is sent."""
        if call.enqueue:
            accepted, headers = await self.submit(http, call)
            headers = {"Location": f"/v1/requests/{quote(call.request_id, safe='')}", **headers}
            return json_response(accepted_document(accepted, call.model), status=202, headers=headers)
        if call.stream:
            return await self.stream(http, call, EventStream(http, call, self._text_of(call.model)))
        document, headers = await self.collect(http, call)
        return json_response(document, headers=headers)

    async def keep_alive(self, passed_s: float) -> None:
        """Gives a comment line to streams that are silent for too long. `passed_s`: since the call before."""
        for stream in tuple(self._streams):
            if stream.is_silent(passed_s):
                with suppress(ConnectionError):
                    await stream.comment("keep-alive")

    async def submit(self, http: web.Request, call: Call) -> tuple[Accepted, dict[str, str]]:
        """Accepts the call's request, which nobody waits for; with the headers of the answer."""
        submitted = await self._service.Submit(SubmitRequest(request=call.requests[0]), UnaryContext(metadata_of(http)))
        return submitted.accepted, answer_headers(call, [submitted.accepted])

    async def collect(self, http: web.Request, call: Call) -> tuple[dict[str, Any], dict[str, str]]:
        """The completion of a call that is waited for, and the headers of the answer."""
        metadata, acceptance = metadata_of(http), JointAcceptance(len(call.requests))
        choices = [CollectedChoice(index, metadata, acceptance) for index in range(len(call.requests))]
        within_s = READ_TIMEOUT_SHARE * call.read_timeout_s
        try:
            async with asyncio.timeout(within_s if within_s < math.inf else None):
                await self._generate(call, choices, acceptance)
        except (asyncio.CancelledError, TimeoutError) as left:
            if self._cancels_abandoned():
                await self._withdraw(call, metadata)
            if isinstance(left, TimeoutError):
                raise self._still_waiting(call, len(acceptance.accepted)) from None
            raise
        text_of = self._text_of(call.model)
        document = completion(
            request_id=call.request_id,
            created=created_of(acceptance.accepted[0]),
            model=call.model,
            tier=call.tier,
            choices=[each.document(text_of, call) for each in choices],
            usage=usage_of(call, [each.result.usage for each in choices if each.result is not None]),
            chat=call.chat,
        )
        return document, answer_headers(call, acceptance.accepted)

    def _still_waiting(self, call: Call, accepted: int) -> QlmError:
        """The error of a client that would not wait any longer."""
        if accepted < len(call.requests):
            return CallDeadlineExceeded("no answer of the queue within the client's read timeout; it may or may not have the request")
        path = f"/v1/requests/{quote(call.request_id, safe='')}"
        end = "it is cancelled" if self._cancels_abandoned() else f"it goes on, and GET {path} will have its result"
        text = f"the request takes longer than the client reads ({call.read_timeout_s:g} s): {end}. Stream it, or send {MODE}: enqueue"
        return HttpError(504, STILL_WAITING, text)

    async def stream(self, http: web.Request, call: Call, stream: EventStream) -> web.StreamResponse:
        """Streams the call's answer."""
        choices = stream.choices(metadata_of(http))
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
            await stream.fail(error if isinstance(error, QlmError) else logged_error(error))
        finally:
            self._streams.discard(stream)
        return stream.response

    async def _generate(self, call: Call, choices: Sequence[CallContext], acceptance: JointAcceptance) -> None:
        """All choices side by side. Raises the first error. Where one was refused, the others are cancelled, unless the client named the
        call: then it may send it again."""
        try:
            await _side_by_side(
                [
                    acceptance.run(self._service.Generate(GenerateRequest(request=each, outlook_every_s=_outlook_every_s(call)), to))
                    for each, to in zip(call.requests, choices, strict=True)
                ]
            )
        except QlmError:
            if acceptance.refusal is not None and acceptance.accepted and not call.keyed:
                await self._withdraw(call, tuple(choices[0].invocation_metadata() or ()))
            raise

    async def _resume(self, call: Call, stream: EventStream, choices: Sequence[StreamedChoice]) -> None:
        """Goes on behind the event that the client has. One that is not known is refused before the answer's head."""
        assert call.resume is not None, "the call names an event"
        for request_id in call.ids:
            await self._service.Result(ResultRequest(request_id=request_id), choices[0])
        await stream.open(call.resume.created)
        await _side_by_side(
            [
                self._service.Stream(StreamRequest(request_id=request_id, offset=offset, outlook_every_s=_outlook_every_s(call)), to)
                for request_id, offset, to in zip(call.ids, call.resume.offsets, choices, strict=True)
            ]
        )

    async def _withdraw(self, call: Call, metadata: Metadata) -> None:
        """Cancels those that were accepted, as far as the queue answers."""
        for name in call.ids:
            try:
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    await self._service.Cancel(CancelRequest(request_id=name), UnaryContext(metadata))
            except NotFound:
                pass  # refused
            except (QlmError, TimeoutError) as error:
                structlog.get_logger().warning("not_cancelled", request_id=name, error=str(error))


class UnaryContext:
    """The context of a call that is answered with one message."""

    def __init__(self, metadata: Metadata = ()) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    async def write(self, message: object) -> None:
        raise AssertionError("the call streams nothing")


def _outlook_every_s(call: Call) -> float:
    return max(OUTLOOK_EVERY_MIN_S, call.keep_alive_s) if call.positions else 0.0


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


def metadata_of(http: web.Request) -> Metadata:
    return [(name, http.headers[name]) for name in _PASSED_ON if name in http.headers]
