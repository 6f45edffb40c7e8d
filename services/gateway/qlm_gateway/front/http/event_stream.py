"""The answer of a streamed call: server-sent events, with ids by which another gateway goes on where this one ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from qlm.api.v1.gateway_pb2 import Accepted, StreamResponse, TokenChunk
from qlm.api.v1.prediction_pb2 import Prediction
from qlm.api.v1.request_pb2 import RequestState, Usage
from qlm_core.vocabulary.errors import QlmError
from qlm_gateway.front.http.answers import ChunkForm, TextOf, created_of, finish_reason, logprobs_of, outlook_comment, usage_of
from qlm_gateway.front.http.calls import Call, EventId
from qlm_gateway.front.http.errors import ended_error, error_body
from qlm_gateway.front.http.joint_acceptance import JointAcceptance
from qlm_gateway.front.http.tools import Delta, ToolReader

ESTIMATED_WAIT = "x-qlm-estimated-wait-seconds"
POSITION = "x-qlm-position"
Metadata = Sequence[tuple[str, str | bytes]]


def answer_headers(call: Call, accepted: Sequence[Accepted]) -> dict[str, str]:
    """Headers of the answer to a call whose requests were accepted, with the longest wait of its choices."""
    found = [each.prediction for each in accepted if each.HasField("prediction")]
    return {"x-request-id": call.request_id, **(wait_headers(max(found, key=lambda each: each.wait_p50_s)) if found else {})}


def wait_headers(prediction: Prediction) -> dict[str, str]:
    return {ESTIMATED_WAIT: f"{prediction.wait_p50_s:.3f}", POSITION: f"{prediction.requests_ahead}"}


class EventStream:
    """One answer for all choices of a call. Its head is sent when all of them were accepted, so that a refusal has a status."""

    def __init__(self, http: web.Request, call: Call, text_of: TextOf) -> None:
        self._http = http
        self._call = call
        self.text_of = text_of
        self.acceptance = JointAcceptance(len(call.requests))
        self._opening = False
        self._opened = asyncio.Event()
        self._response = web.StreamResponse()
        self._offsets = [0] * len(call.requests) if call.resume is None else list(call.resume.offsets)
        self._id_head = ""
        self._silent_s = 0.0
        self.form: ChunkForm

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def choices(self, metadata: Metadata) -> list[StreamedChoice]:
        return [StreamedChoice(self, index, offset, metadata, self._call) for index, offset in enumerate(self._offsets)]

    async def open(self, created: int) -> None:
        """Sends the head, once. `created`: seconds since the epoch."""
        if self._opening:
            await self._opened.wait()
            return
        self._opening = True
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._response.headers.update({**headers, **answer_headers(self._call, self.acceptance.accepted)})
        self.form = self._form(created)
        self._id_head = str(EventId(request_id=self._call.request_id, created=created, offsets=()))
        await self._response.prepare(self._http)
        self._opened.set()

    def _form(self, created: int) -> ChunkForm:
        return ChunkForm(self._call, created)

    async def send(self, index: int, chunks: Sequence[tuple[str, int]]) -> None:
        """Chunks of a choice, each with the tokens of that choice that were sent with it and before. Waits for a reader that is slow."""
        events = []
        for data, offset in chunks:
            self._offsets[index] = offset
            # Calls of tools are read from the start of an answer: such a stream cannot go on in the middle.
            event_id = f"id: {self._id_head}{','.join(map(str, self._offsets))}\n" if self._call.tools is None else ""
            events.append(f"{event_id}data: {data}\n\n")
        await self._write("".join(events).encode())

    async def end(self, usages: Sequence[Usage]) -> None:
        usage = f"data: {self.form.usage(usage_of(self._call, usages))}\n\n" if self._call.include_usage else ""
        await self._write(f"{usage}data: [DONE]\n\n".encode())
        await self._response.write_eof()

    async def fail(self, error: QlmError) -> None:
        """Ends an open stream with an error."""
        await self._write(b"data: " + error_body(error, chat=self._call.chat) + b"\n\n")
        await self._response.write_eof()

    def is_silent(self, passed_s: float) -> bool:
        """Whether it needs a comment now. `passed_s`: since the call before."""
        self._silent_s += passed_s
        return self._silent_s > self._call.keep_alive_s

    async def comment(self, text: str) -> None:
        """A comment line, unless the reader is slow. No blank line follows: after it the official client would read an event without data,
        once it has seen an id."""
        transport = self._http.transport
        if self.is_open and transport is not None and not transport.get_write_buffer_size():
            await self._write(f": {text}\n".encode())

    async def _write(self, data: bytes) -> None:
        self._silent_s = 0.0
        await self._response.write(data)


class StreamedChoice:
    """The context of one choice's call to the service: its messages become events."""

    def __init__(self, stream: EventStream, index: int, offset: int, metadata: Metadata, call: Call) -> None:
        self._stream = stream
        self._index = index
        self._offset = offset
        self._metadata = metadata
        self._chat = call.chat
        self._role_due = call.chat and offset == 0
        self._characters = 0
        self._reader = None if call.tools is None else ToolReader(call.tools, call.ids[index])
        self.usage = Usage()

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    async def write(self, message: StreamResponse) -> None:
        """Raises RequestEnded for a result that is no answer."""
        if message.HasField("accepted"):
            await self._stream.acceptance.accept(message.accepted)
            await self._stream.open(created_of(self._stream.acceptance.accepted[0]))
            return
        if message.HasField("outlook"):
            await self._stream.comment(outlook_comment(self._index, message.outlook))
            return
        chunks: list[tuple[str, int]] = []
        if self._role_due:
            self._role_due = False
            chunks.append((self._stream.form.role(self._index), self._offset))
        if message.HasField("tokens"):
            self._add_tokens(message.tokens, chunks)
        if message.HasField("result"):
            result = message.result
            if result.state != RequestState.REQUEST_STATE_COMPLETED:
                raise ended_error(result)
            self.usage = result.usage
            reason = finish_reason(result)
            if self._reader is not None:
                self._add_deltas(self._reader.end(), chunks)
                reason = self._reader.finish(reason)
            chunks.append((self._stream.form.finish(self._index, reason), self._offset))
        if chunks:
            await self._stream.send(self._index, chunks)

    def _add_tokens(self, chunk: TokenChunk, chunks: list[tuple[str, int]]) -> None:
        """Tokens that are no character yet go with the next ones."""
        self._offset = chunk.offset + (len(chunk.token_ids) or len(chunk.pieces))
        if self._reader is not None:
            self._add_deltas(self._reader.feed(chunk.text), chunks)
            return
        logprobs = None
        if chunk.HasField("logprobs"):
            logprobs = logprobs_of(chunk.logprobs, chunk.token_ids, self._stream.text_of, chat=self._chat, text_offset=self._characters)
        if chunk.text or logprobs is not None:
            self._characters += len(chunk.text)
            chunks.append((self._stream.form.text(self._index, chunk.text, logprobs), self._offset))

    def _add_deltas(self, deltas: Sequence[Delta], chunks: list[tuple[str, int]]) -> None:
        chunks += [(self._stream.form.delta(self._index, delta), self._offset) for delta in deltas]
