"""Messages in and out: protos stop here."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from qlm.api.v1.gateway_pb2 import Accepted, StreamResponse, TokenChunk
from qlm.api.v1.prediction_pb2 import Prediction
from qlm.api.v1.request_pb2 import Admission, Logprobs, Request, RequestState, Result, TokenPrompt, TraceContext
from qlm.internal.v1.frames_pb2 import Frame
from qlm_core.statistics.length_model import LengthGuess
from qlm_core.vocabulary.request import RequestState as State
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_core.vocabulary.slo_rules import SLO_KINDS
from qlm_gateway.admission.drafts import RequestDraft, SamplingDraft, SloDraft
from qlm_gateway.admission.rules import Admitted
from qlm_gateway.streams.events import FrameFacts
from qlm_gateway.text.prompts import PreparedPrompt
from qlm_process.wire import lengths as length_wire
from qlm_process.wire.chat import chat_from_proto
from qlm_process.wire.slo import slo_message
from qlm_queue.values import AcceptReceipt

DIGEST_BYTES = 16
TOKEN_BYTES = 4

STATES: dict[State, RequestState.ValueType] = {
    State.ACCEPTED: RequestState.REQUEST_STATE_ACCEPTED,
    State.PLACED: RequestState.REQUEST_STATE_PLACED,
    State.RUNNING: RequestState.REQUEST_STATE_RUNNING,
    State.COMPLETED: RequestState.REQUEST_STATE_COMPLETED,
    State.FAILED: RequestState.REQUEST_STATE_FAILED,
    State.CANCELLED: RequestState.REQUEST_STATE_CANCELLED,
    State.EXPIRED: RequestState.REQUEST_STATE_EXPIRED,
}


def draft_of(request: Request) -> RequestDraft:
    """Returns a client's request as admission reads it. Raises InvalidRequest for a chat with JSON that is none."""
    prompt = request.WhichOneof("prompt")
    return RequestDraft(
        model=request.model,
        text=request.text if prompt == "text" else None,
        chat=chat_from_proto(request) if prompt == "chat" else None,
        token_ids=request.tokens.ids if prompt == "tokens" else None,
        sampling=_sampling_of(request) if request.HasField("sampling") else None,
        slo=_slo_of(request) if request.HasField("slo") else None,
        tenant=request.tenant,
        application=request.application,
        request_id=request.request_id,
        expire_after_s=request.expire_after_s if request.HasField("expire_after_s") else None,
        expected_output_tokens=request.expected_output_tokens,
        control_tokens_in_text=request.control_tokens_in_text,
    )


def _slo_of(request: Request) -> SloDraft:
    return SloDraft(kind=request.slo.kind, seconds=request.slo.seconds, priority=request.slo.priority)


def _sampling_of(request: Request) -> SamplingDraft:
    sampling = request.sampling
    structure = sampling.WhichOneof("structure")
    return SamplingDraft(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        min_p=sampling.min_p,
        stop=tuple(sampling.stop),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        json_schema=sampling.json_schema if structure == "json_schema" else None,
        regex=sampling.regex if structure == "regex" else None,
    )


def body_digest(request: Request) -> bytes:
    """16 bytes that stand for what the client asks for: not for the key, which names it, nor for trace context and admission.
    Changes the request: those fields are cleared."""
    for field in ("tenant", "request_id", "trace", "admission"):
        request.ClearField(field)
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=DIGEST_BYTES).digest()


def stored_body(request: Request, admitted: Admitted, prompt: PreparedPrompt, trace: TraceContext, guess: LengthGuess) -> bytes:
    """The request as the queue keeps it. Changes the request."""
    request.tenant = admitted.key.tenant
    request.request_id = admitted.key.request_id
    request.trace.CopyFrom(trace)
    if prompt.token_ids is not None and request.WhichOneof("prompt") != "tokens":
        request.tokens.CopyFrom(TokenPrompt(ids=prompt.token_ids))
    slo = slo_message(admitted.slo)
    request.admission.CopyFrom(
        Admission(
            prompt_tokens=admitted.prompt_tokens,
            output_tokens_max=admitted.output_tokens_max,
            slo=slo,
            length_guess=length_wire.guess_to_proto(guess),
        )
    )
    return request.SerializeToString()


def admission_of(body: bytes) -> tuple[str, Slo, int, int, int]:
    """Model, SLO, prompt tokens, most output tokens and predicted output tokens (0: none were) of a stored request."""
    request = Request.FromString(body)
    admission = request.admission
    kind = SLO_KINDS[admission.slo.kind]
    slo = Slo(kind=kind, priority=admission.slo.priority) if kind is SloKind.PRIORITY else Slo(kind=kind, seconds=admission.slo.seconds)
    return request.model, slo, admission.prompt_tokens, admission.output_tokens_max, length_wire.predicted_output_tokens(admission)


def accepted_message(admitted: Admitted, receipt: AcceptReceipt, prediction: Prediction | None, *, paused: bool) -> Accepted:
    return Accepted(
        tenant=admitted.key.tenant,
        request_id=admitted.key.request_id,
        queue_id=receipt.queue_id,
        duplicate=receipt.duplicate,
        state=STATES[receipt.state],
        accepted_s=receipt.accepted_s,
        prompt_tokens=admitted.prompt_tokens,
        prediction=prediction,
        paused=paused,
    )


def chunk_response(
    offset: int, token_ids: Sequence[int], pieces: Sequence[str], text: str, logprobs: Logprobs | None = None
) -> StreamResponse:
    return StreamResponse(tokens=TokenChunk(offset=offset, token_ids=token_ids, pieces=pieces, text=text, logprobs=logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFrame(FrameFacts):
    """A frame as decisions see it, and its message, which they do not read."""

    message: Frame


def frame_facts(frame: Frame) -> ReadFrame:
    """A frame as decisions see it."""
    count = len(frame.token_ids) or len(frame.pieces)
    if not frame.HasField("result"):
        return ReadFrame(queue_id=frame.queue_id, offset=frame.offset, count=count, message=frame)
    result = frame.result
    completed = result.state == RequestState.REQUEST_STATE_COMPLETED
    return ReadFrame(
        message=frame,
        queue_id=frame.queue_id,
        offset=frame.offset,
        count=count,
        last=True,
        total=result.usage.output_tokens if completed else -1,
    )


def message_of(facts: FrameFacts) -> Frame:
    """The message of a frame that was read."""
    assert isinstance(facts, ReadFrame), "the facts of `frame_facts`"
    return facts.message


def tokens_of(progress: bytes) -> Sequence[int]:
    """Token ids of stored progress: little-endian uint32."""
    tokens = array("I", progress)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def without_output(result: Result) -> Result:
    """The end of a stream: the output was streamed. Changes the result."""
    for field in ("output_token_ids", "output_pieces", "output_text", "logprobs"):
        result.ClearField(field)
    return result
