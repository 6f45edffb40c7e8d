"""The Gateway service of gateway.proto: one method for each call, on top of entry, hub and watch."""

# ruff: noqa: N802 (methods are named by the proto)

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from qlm.api.v1.gateway_pb2 import (
    Accepted,
    CancelRequest,
    CancelResponse,
    GenerateRequest,
    ListModelsRequest,
    ListModelsResponse,
    ListRequestsRequest,
    ListRequestsResponse,
    PauseRequest,
    PauseResponse,
    QueueStatusRequest,
    QueueStatusResponse,
    ResultRequest,
    ResultResponse,
    StreamRequest,
    StreamResponse,
    SubmitRequest,
    SubmitResponse,
)
from qlm.api.v1.gateway_pb2_grpc import GatewayServicer
from qlm.api.v1.request_pb2 import Request, RequestState, ResultError
from qlm.api.v1.request_pb2 import Result as ResultMessage
from qlm_core.vocabulary.errors import invalid_field
from qlm_core.vocabulary.name_rules import TENANT_BYTES_MAX, check_name
from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.admission.catalogue import ModelEntry
from qlm_gateway.admission.entry import Entered, Entry
from qlm_gateway.admission.rules import model_of
from qlm_gateway.front.callers import Caller, Callers
from qlm_gateway.front.listing import listed
from qlm_gateway.front.status import models_message, queue_message, request_message
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.outlook.updates import OutlookUpdates, checked_every_s
from qlm_gateway.outlook.watch import QueueWatch
from qlm_gateway.streams.events import ReaderKind
from qlm_gateway.streams.hub import StreamHub
from qlm_gateway.streams.reader_stream import ReaderStream
from qlm_gateway.text.model_text import ApproximateText, ModelText, decode_in_pieces
from qlm_gateway.wire import STATES, chunk_response, without_output
from qlm_queue.port import Queue
from qlm_queue.values import ESTIMATOR_ROLE, PLANNER_ROLE, TerminalRecord

WAIT_S_MAX = 3_600.0
CANCELLED_RESULT = ResultMessage(error=ResultError(reason="CANCELLED", message="a client cancelled it")).SerializeToString()


class CallContext(Protocol):
    """The part of gRPC's context that calls use; other fronts have one of their own, which writes messages in another form."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    async def write(self, message: StreamResponse) -> None: ...


class GatewayService(GatewayServicer):
    """Errors are QlmErrors, which the server's interceptor turns into codes and reasons. Times out with its caller's deadline."""

    def __init__(
        self,
        queue: Queue,
        catalogue: Mapping[str, ModelEntry],
        aliases: Mapping[str, str],
        texts: Mapping[str, ModelText],
        entry: Entry,
        hub: StreamHub,
        watch: QueueWatch,
        updates: OutlookUpdates,
        metrics: GatewayMetrics,
        callers: Callers | None = None,
    ) -> None:
        self._callers = callers or Callers()
        self._updates = updates
        self._queue = queue
        self._catalogue = catalogue
        self._aliases = aliases
        self._texts = texts
        self._entry = entry
        self._hub = hub
        self._watch = watch
        self._metrics = metrics

    # The two streams write to the context themselves: half the cost of a generator, and they end where they are cancelled.

    async def Generate(self, request: GenerateRequest, context: CallContext) -> None:  # type: ignore[override]
        metadata = _metadata(context)
        caller = self._callers.caller(metadata)
        self._admit(caller, request.request)
        every_s = checked_every_s(request.outlook_every_s)
        self._hub.check_room()
        stream = self._hub.expect()
        try:
            async with self._callers.held(caller):
                entered = await self._enter(caller, request.request, metadata, self._hub.gateway)
                if entered.receipt.duplicate:
                    self._hub.open(entered.key, ReaderKind.TOKENS, stream=stream)
                else:
                    self._hub.accepted(stream, entered.key, entered.receipt.queue_id, entered.model)
                await context.write(StreamResponse(accepted=await self._with_prediction(entered)))
                await self._follow(stream, context, entered.key, every_s)
        finally:
            self._hub.close(stream)

    async def Stream(self, request: StreamRequest, context: CallContext) -> None:  # type: ignore[override]
        caller = self._caller(context)
        key = caller.request_key(request.tenant, request.request_id)
        every_s = checked_every_s(request.outlook_every_s)
        self._hub.check_room()
        stream = self._hub.open(key, ReaderKind.TOKENS, request.offset)
        try:
            async with self._callers.held(caller):
                await self._follow(stream, context, key, every_s)
        finally:
            self._hub.close(stream)

    async def Submit(self, request: SubmitRequest, context: CallContext) -> SubmitResponse:
        metadata = _metadata(context)
        caller = self._callers.caller(metadata)
        self._admit(caller, request.request)
        self._hub.check_open()
        # Nobody reads its tokens yet, so they are sent nowhere.
        entered = await self._enter(caller, request.request, metadata, "")
        return SubmitResponse(accepted=await self._with_prediction(entered))

    async def Result(self, request: ResultRequest, context: CallContext) -> ResultResponse:
        caller = self._caller(context)
        key = caller.request_key(request.tenant, request.request_id)
        if not 0.0 <= request.wait_s <= WAIT_S_MAX:
            raise invalid_field("wait_s", f"from 0 to {WAIT_S_MAX:g}", request.wait_s)
        result = None
        if request.wait_s > 0.0:
            async with self._callers.held(caller):
                result = await self._wait_for_end(key, request.wait_s)
        if result is None:
            found = await self._queue.find(key)
            if not isinstance(found, TerminalRecord):
                return ResultResponse(state=STATES[found.state])
            result = ResultMessage.FromString(found.result)
        await self._give_text(result)
        return ResultResponse(state=result.state, result=result)

    # The same for the gateway's own requests, those of batches. All raise QlmError.

    async def submit(self, request: Request) -> None:
        """Accepts a request whose tokens nobody follows."""
        self._hub.check_open()
        request.model = self._aliases.get(request.model, request.model)
        await self._entry.enter(request, (), "")

    async def end_of(self, key: RequestKey, wait_s: float) -> ResultMessage | None:
        """The result, with its text; None where it has not ended within `wait_s`."""
        result = await self._wait_for_end(key, wait_s)
        if result is not None:
            await self._give_text(result)
        return result

    async def cancel(self, key: RequestKey) -> None:
        await self._queue.cancel(key, CANCELLED_RESULT)

    async def _give_text(self, result: ResultMessage) -> None:
        if result.output_pieces:
            result.output_text = "".join(result.output_pieces)
        else:
            result.output_text = await decode_in_pieces(self._text(result.model), result.output_token_ids)

    async def Cancel(self, request: CancelRequest, context: CallContext) -> CancelResponse:
        key = self._caller(context).request_key(request.tenant, request.request_id, of_any=True)
        return CancelResponse(state=STATES[await self._queue.cancel(key, CANCELLED_RESULT)])

    async def erase(self, request_id: str, context: CallContext) -> RequestState.ValueType:
        """Cancels a request and erases its result; the state that it ended in. Raises NotFound."""
        key = self._caller(context).request_key("", request_id)
        return STATES[await self._queue.erase(key, CANCELLED_RESULT)]

    async def ListModels(self, request: ListModelsRequest, context: CallContext) -> ListModelsResponse:
        caller = self._caller(context)
        models = models_message(self._catalogue, self._aliases, self._watch.instances)
        return ListModelsResponse(models=[model for model in models if caller.may_use(self._aliases.get(model.name, model.name))])

    async def QueueStatus(self, request: QueueStatusRequest, context: CallContext) -> QueueStatusResponse:
        caller = self._caller(context)
        named = request.tenant or request.request_id
        key = caller.request_key(request.tenant, request.request_id, of_any=True) if named else None
        overview = await self._watch.overview()
        planner, estimator, refusal, held, loss = await asyncio.gather(
            self._queue.leader_address(PLANNER_ROLE),
            self._queue.leader_address(ESTIMATOR_ROLE),
            self._queue.refusal(),
            self._queue.held(),
            self._queue.loss(),
        )
        response = queue_message(self._queue.name, overview, planner=planner, estimator=estimator, refusal=refusal, held=held, loss=loss)
        if key is not None:
            await self._watch.read_waits()
            response.request.CopyFrom(await request_message(self._queue, key, self._watch.recent, self._watch.now_s()))
        return caller.part_of(response)

    async def ListRequests(self, request: ListRequestsRequest, context: CallContext) -> ListRequestsResponse:
        caller = self._caller(context)
        if not caller.is_operator:
            request.tenant = caller.tenant(request.tenant)
        return await listed(self._queue, request, await self._watch.overview(), self._watch.now_s())

    async def Pause(self, request: PauseRequest, context: CallContext) -> PauseResponse:
        self._caller(context).check_operator()
        kind, name = _whose(request)
        if kind is PauseKind.MODEL:
            model_of(name, self._catalogue)
        changed = await self._queue.pause(kind, name)
        await self._watch.read_pauses()
        return PauseResponse(changed=changed)

    async def Resume(self, request: PauseRequest, context: CallContext) -> PauseResponse:
        self._caller(context).check_operator()
        changed = await self._queue.resume(*_whose(request))
        await self._watch.read_pauses()
        return PauseResponse(changed=changed)

    def _caller(self, context: CallContext) -> Caller:
        return self._callers.caller(context.invocation_metadata())

    def _admit(self, caller: Caller, request: Request) -> None:
        request.model = self._aliases.get(request.model, request.model)
        self._callers.admit(caller, request, self._entry.default_slo.seconds)

    async def _enter(self, caller: Caller, request: Request, metadata: tuple[tuple[str, str | bytes], ...], gateway: str) -> Entered:
        entered = await self._entry.enter(request, metadata, gateway)
        if not entered.receipt.duplicate:
            self._callers.accepted(caller, entered.message.prompt_tokens)
        return entered

    async def _with_prediction(self, entered: Entered) -> Accepted:
        """A client's prediction at acceptance. One that was accepted before has its place, and is predicted there while it waits."""
        if entered.receipt.duplicate:
            outlook = await self._updates.of(entered.key)
            if outlook is not None and outlook.HasField("prediction"):
                entered.message.prediction.CopyFrom(outlook.prediction)
        return entered.message

    async def _follow(self, stream: ReaderStream, context: CallContext, key: RequestKey, every_s: float) -> None:
        """Writes what the reader is given, up to the result, and while it waits, also again, its outlook every so often (0: never). Raises
        what ends it early."""
        detokenizer = None
        end = 0
        while True:
            if every_s:
                await self._send_outlooks(stream, context, key, every_s)
            await stream.wait()
            if stream.unread:
                offset, token_ids, pieces, logprobs = stream.take()
                self._hub.taken(stream)
                end = offset + (len(token_ids) or len(pieces))
                if detokenizer is None:
                    detokenizer = self._text(stream.model).detokenizer(stream.before)
                self._metrics.streamed_tokens.inc(end - offset)
                text = "".join(pieces) if pieces else detokenizer.feed(token_ids)
                if stream.result is None or stream.unread or stream.error is not None or stream.forgotten:
                    await context.write(chunk_response(offset, token_ids, pieces, text, logprobs))
                    continue
                # The end most often arrives with the last tokens, and a message costs more than its content.
                last = chunk_response(offset, token_ids, pieces, text + detokenizer.flush(), logprobs)
                last.result.CopyFrom(without_output(stream.result))
                await context.write(last)
                return
            if stream.error is not None:
                raise stream.error
            if stream.forgotten:
                self._hub.taken(stream)
                continue
            assert stream.result is not None, "a reader waits for output, an error or the result"
            rest = detokenizer.flush() if detokenizer is not None else ""
            if rest:
                await context.write(chunk_response(end, (), (), rest))
            await context.write(StreamResponse(result=without_output(stream.result)))
            return

    async def _send_outlooks(self, stream: ReaderStream, context: CallContext, key: RequestKey, every_s: float) -> None:
        """Waits until there is another update."""
        while not stream.ready:
            try:
                async with asyncio.timeout(every_s):
                    await stream.wait()
            except TimeoutError:
                outlook = await self._updates.of(key)
                if outlook is not None:
                    await context.write(StreamResponse(outlook=outlook))

    async def _wait_for_end(self, key: RequestKey, wait_s: float) -> ResultMessage | None:
        self._hub.check_room()
        stream = self._hub.open(key, ReaderKind.END)
        try:
            async with asyncio.timeout(wait_s):
                await stream.wait()
        except TimeoutError:
            return None
        finally:
            self._hub.close(stream)
        if stream.error is not None:
            raise stream.error
        return stream.result

    def _text(self, model: str) -> ModelText:
        """A model that left the catalogue reads as simulated ones do: there is no tokenizer for it here."""
        return self._texts.get(model) or ApproximateText()


def _whose(request: PauseRequest) -> tuple[PauseKind, str]:
    """Returns the kind and name that a client pauses or resumes. Raises InvalidRequest."""
    whose = request.WhichOneof("whose")
    if whose == "tenant":
        check_name("tenant", request.tenant, TENANT_BYTES_MAX)
        return PauseKind.TENANT, request.tenant
    if not request.model:
        raise invalid_field("model", "present, or tenant")
    return PauseKind.MODEL, request.model


def _metadata(context: CallContext) -> tuple[tuple[str, str | bytes], ...]:
    return tuple(context.invocation_metadata() or ())
