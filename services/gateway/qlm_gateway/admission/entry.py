"""The way into the queue: a request is checked, counted, traced and made durable. The path that every request pays for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from qlm.api.v1.gateway_pb2 import Accepted
from qlm.api.v1.request_pb2 import Request, TraceContext
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.length_features import LengthFacts, hashes_of_text, hashes_of_tokens
from qlm_core.statistics.length_model import LengthGuess
from qlm_core.vocabulary.errors import NotFound, QlmError, QueueFull
from qlm_core.vocabulary.group import prompt_class, slo_class
from qlm_core.vocabulary.request import RequestKey, RequestState, Slo
from qlm_gateway.admission.catalogue import ModelEntry
from qlm_gateway.admission.drafts import RequestDraft, SamplingDraft
from qlm_gateway.admission.overload import late_refusal
from qlm_gateway.admission.rules import AdmissionLimits, Admitted, admit, check
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.outlook.waits import RequestShape
from qlm_gateway.outlook.watch import QueueWatch
from qlm_gateway.text.model_text import ModelText
from qlm_gateway.text.prompts import INLINE_BYTES_MAX, PreparedPrompt, prepare
from qlm_gateway.wire import accepted_message, body_digest, draft_of, stored_body
from qlm_process import gen_ai
from qlm_process.tracing import LateSpan, context_of, traceparent_of, tracestate_of
from qlm_process.wire import prediction as prediction_wire
from qlm_queue.port import Queue
from qlm_queue.values import Acceptance, AcceptReceipt

SPAN_NAME = "qlm.gateway.accept"
TRACEPARENT_BYTES_MAX = 256
"""It has 55 bytes today; a later version may have more. A longer one starts a new trace: no request fails for its trace."""
TRACESTATE_BYTES_MAX = 512
"""W3C asks to carry at least so much; longer ones are dropped."""

ACCEPTS_IN_FLIGHT_MAX = 64
"""Calls of `accept` at a time. In a burst the others wait here for their turn, within their client's deadline: the deadline of a call to
the queue is for the queue to keep, not for the crowd before it."""

Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A request that is in the queue now, or was before (`receipt.duplicate`; `message` has no prediction then)."""

    key: RequestKey
    model: str
    receipt: AcceptReceipt
    message: Accepted


class Entry:
    """Takes requests into a queue. `new_request_id`: for requests without one. `refuse_late`: refuses what would be late."""

    def __init__(
        self,
        queue: Queue,
        catalogue: Mapping[str, ModelEntry],
        texts: Mapping[str, ModelText],
        limits: AdmissionLimits,
        watch: QueueWatch,
        metrics: GatewayMetrics,
        tracer: Tracer,
        new_request_id: Callable[[], str],
        monotonic: Callable[[], float],
        *,
        refuse_late: bool = False,
    ) -> None:
        self._refuse_late = refuse_late
        self._queue = queue
        self._catalogue = catalogue
        self._texts = texts
        self._limits = limits
        self._watch = watch
        self._metrics = metrics
        self._accepts = metrics.accepts.labels("accepted")
        self._duplicates = metrics.accepts.labels("duplicate")
        self._tracer = tracer
        self._new_request_id = new_request_id
        self._monotonic = monotonic
        self._turns = asyncio.Semaphore(ACCEPTS_IN_FLIGHT_MAX)

    @property
    def default_slo(self) -> Slo:
        """The SLO of requests that name none."""
        return self._limits.default_slo

    async def enter(self, request: Request, metadata: Metadata, gateway: str) -> Entered:
        """Accepts a request, with its frames sent to `gateway` ("" for nowhere). Changes the message. Raises InvalidRequest, NotFound,
        RequestIdConflict, QueueFull (with retry_after_s), Unavailable: it may or may not be in the queue."""
        started_s = self._monotonic()
        late, attributes, status = self._start_span(request, metadata), dict[str, AttributeValue](), None
        try:
            entered = await self._enter(request, gateway, late.span, attributes)
        except QlmError as error:
            status = Status(StatusCode.ERROR, error.reason)
            self._metrics.accepts.labels(error.reason).inc()
            raise
        finally:
            late.end(attributes=attributes, status=status)
        (self._duplicates if entered.receipt.duplicate else self._accepts).inc()
        self._metrics.accept_seconds.observe(self._monotonic() - started_s)
        return entered

    async def _enter(self, request: Request, gateway: str, span: Span, attributes: dict[str, AttributeValue]) -> Entered:
        """`span`: what the request is traced under; `attributes`: takes its attributes for the trace."""
        request.DiscardUnknownFields()
        draft = draft_of(request)
        long = draft.token_ids is not None and len(draft.token_ids) > INLINE_BYTES_MAX
        checking = partial(check, draft, self._catalogue, self._limits)
        model = await asyncio.to_thread(checking) if long else checking()
        prompt = await prepare(draft, self._texts[draft.model])
        admitted = admit(draft, model, prompt.tokens, self._limits, self._new_request_id)
        attributes |= {
            "qlm.request_id": admitted.key.request_id,
            "qlm.tenant": admitted.key.tenant,
            "qlm.model": draft.model,
            gen_ai.OPERATION_NAME: gen_ai.COMPLETION if draft.chat is None else gen_ai.CHAT,
            gen_ai.PROVIDER_NAME: gen_ai.PROVIDER,
            gen_ai.REQUEST_MODEL: draft.model,
            gen_ai.REQUEST_MAX_TOKENS: admitted.output_tokens_max,
            gen_ai.INPUT_TOKENS: admitted.prompt_tokens,
        }
        digest = body_digest(request)
        guess = guess_length(draft, admitted, prompt, self._watch.profiles)
        trace = TraceContext(traceparent=traceparent_of(span), tracestate=tracestate_of(span))
        acceptance = Acceptance(
            key=admitted.key,
            body=stored_body(request, admitted, prompt, trace, guess),
            digest=digest,
            gateway=gateway,
            slo_class=slo_class(admitted.slo),
            prompt_tokens=admitted.prompt_tokens,
            expire_after_s=admitted.expire_after_s,
        )
        shape = RequestShape(
            model=draft.model,
            slo=admitted.slo,
            prompt_tokens=admitted.prompt_tokens,
            output_tokens_max=admitted.output_tokens_max,
            predicted_output_tokens=guess.class_tokens,
            tenant=admitted.key.tenant,
        )
        if self._refuse_late:
            await self._check_in_time(shape, admitted.key)
        async with self._turns:
            receipt = await self._accept(acceptance)
        attributes["qlm.queue_id"] = receipt.queue_id
        outlook = self._watch.recent
        found = None if outlook is None or receipt.duplicate else outlook.predict_new(shape, self._watch.now_s())
        prediction = None if found is None else prediction_wire.to_proto(found, admitted.slo)
        if not receipt.duplicate:
            self._watch.accepted(receipt.queue_id, receipt.accepted_s, receipt.acceptance_number, shape, found)
        waits = receipt.state in (RequestState.ACCEPTED, RequestState.PLACED)
        paused = outlook is not None and waits and outlook.is_paused(shape)
        message = accepted_message(admitted, receipt, prediction, paused=paused)
        return Entered(key=admitted.key, model=draft.model, receipt=receipt, message=message)

    async def _check_in_time(self, shape: RequestShape, key: RequestKey) -> None:
        """Raises QueueFull WOULD_BE_LATE. One that is in the queue already is no new request, however late."""
        outlook = self._watch.recent
        if outlook is None:
            return
        prediction = outlook.predict_new(shape, self._watch.now_s())
        share = 1.0 if prediction is None else outlook.share_of(prediction.instance)
        refusal = late_refusal(
            prediction,
            shape.slo,
            age_s=self._watch.now_s() - outlook.waits.made_s,
            drain_per_s=self._watch.drain_rate.per_s * share,
        )
        if refusal is None:
            return
        try:
            await self._queue.find(key)
        except NotFound:
            raise refusal from None

    async def _accept(self, acceptance: Acceptance) -> AcceptReceipt:
        try:
            return await self._queue.accept(acceptance)
        except QueueFull as error:
            name = {"tenant": acceptance.key.tenant, "class": acceptance.slo_class}.get(error.details.get("bound", ""), "")
            error.details["retry_after_s"] = f"{self._watch.retry_after_s(error, name):.3f}"
            raise

    def _start_span(self, request: Request, metadata: Metadata) -> LateSpan:
        """A child of the trace that the request names, else of the one that the call carries."""
        traceparent, tracestate = request.trace.traceparent, request.trace.tracestate
        if not traceparent:
            carried = {key: value for key, value in metadata if isinstance(value, str)}
            traceparent, tracestate = carried.get("traceparent", ""), carried.get("tracestate", "")
        if len(traceparent) > TRACEPARENT_BYTES_MAX:
            traceparent = ""
        if len(tracestate) > TRACESTATE_BYTES_MAX:
            tracestate = ""
        return LateSpan(self._tracer, SPAN_NAME, context_of(traceparent, tracestate))


def guess_length(draft: RequestDraft, admitted: Admitted, prompt: PreparedPrompt, profiles: ProfileSnapshot) -> LengthGuess:
    """The output's length by the newest profiles: the median of the request's group, or what the length model says where that is in use.
    In process: no request waits for it."""
    facts = LengthFacts(
        model=draft.model,
        tenant=admitted.key.tenant,
        application=draft.application,
        prompt_tokens=admitted.prompt_tokens,
        output_tokens_limit=draft.sampling.max_tokens if draft.sampling is not None else 0,
        prompt_hashes=hashes_of_tokens(prompt.token_ids) if prompt.token_ids is not None else hashes_of_text(prompt.text or ""),
        sampling=_sampling_word(draft.sampling),
        hint_tokens=draft.expected_output_tokens,
    )
    curve = profiles.output_curve_for(draft.model, slo_class(admitted.slo), prompt_class(admitted.prompt_tokens))
    return profiles.length_model.guess(facts, curve.median_tokens, admitted.output_tokens_max)


def _sampling_word(sampling: SamplingDraft | None) -> str:
    """Names the sampling options that bear on the length of an answer; "" for the defaults."""
    if sampling is None:
        return ""
    parts = (
        ("greedy", sampling.temperature == 0.0),
        ("structured", sampling.json_schema is not None or sampling.regex is not None),
        ("stop", bool(sampling.stop)),
    )
    return "-".join(name for name, there in parts if there)
