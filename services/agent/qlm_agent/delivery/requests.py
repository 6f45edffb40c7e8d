"""Converts a pulled request for the engine and the machine. The agent's one reader of request messages, and of the planner's groups."""

from __future__ import annotations

import math

from google.protobuf.message import DecodeError

from qlm.api.v1 import request_pb2
from qlm_agent.decisions.events import PulledRun, QueueHead, WaitingGroup
from qlm_agent.delivery.frames import frame_prefix
from qlm_agent.delivery.held_run import HeldOutput, HeldRun, run_id_of
from qlm_agent.engines.port import EngineRequest, Prompt, Sampling, TextPrompt, TokenPrompt
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import InvalidRequest
from qlm_core.vocabulary.group import slo_class
from qlm_core.vocabulary.request import Slo, SloKind
from qlm_core.vocabulary.slo_rules import SLO_KINDS
from qlm_process.tracing import stored_context
from qlm_process.wire.chat import chat_from_proto
from qlm_queue.values import GroupBehind, HeadGroup, Pulled


def read_pulled(pulled: Pulled, *, text_output: bool, pulled_s: float, engine_clock_s: float, slo_band: int = 0) -> HeldRun:
    """`engine_clock_s`: the engine's clock minus the queue's; `slo_band`: of requests with an SLO. Unreadable bodies give refused runs."""
    try:
        message = request_pb2.Request.FromString(pulled.body)
    except DecodeError:
        message = request_pb2.Request()
    top = message.sampling.logprobs if message.sampling.HasField("logprobs") and not text_output else None
    output = HeldOutput(pulled.progress, text=text_output, logprobs=pulled.logprobs, top=top)
    slo = _slo(message)
    refusal = _refusal(message, slo) or ("" if output.whole else "the stored output lacks log probabilities")
    request = None
    if not refusal:
        deadline_s = slo.deadline_s(pulled.accepted_s) + engine_clock_s if slo is not None else math.inf
        band = slo.priority if slo is not None and slo.kind is SloKind.PRIORITY else slo_band
        request = _engine_request(message, pulled, output, deadline_s, band)
    return HeldRun(
        run_id=run_id_of(pulled.queue_id, pulled.attempt),
        pulled=pulled,
        request=request,
        refusal=refusal,
        model=message.model,
        prompt_tokens=message.admission.prompt_tokens,
        output_tokens_max=message.admission.output_tokens_max,
        slo_class=slo_class(slo) if slo is not None else "",
        trace=stored_context(message.trace.traceparent, message.trace.tracestate),
        output=output,
        prefix=frame_prefix(pulled.queue_id, pulled.attempt),
        pulled_s=pulled_s,
        slo=slo,
        length_guess=message.admission.length_guess if message.admission.HasField("length_guess") else None,
    )


def pulled_run(held: HeldRun, stored: int) -> PulledRun:
    """The machine's view of a run, of which the server has `stored` output tokens. Earlier attempts that did not fail were given back: for
    others, or because their agents left."""
    slo, pulled = held.slo, held.pulled
    return PulledRun(
        run_id=held.run_id,
        queue_id=pulled.queue_id,
        model=held.model,
        prompt_tokens=held.prompt_tokens,
        output_tokens_max=held.output_tokens_max,
        stored=stored,
        refusal=held.refusal,
        deadline_s=math.inf if slo is None else slo.deadline_s(pulled.accepted_s),
        slo_s=math.inf if slo is None or slo.kind is SloKind.PRIORITY else slo.seconds,
        first_token=slo is not None and slo.kind is SloKind.FIRST_TOKEN,
        priority=slo.priority if slo is not None and slo.kind is SloKind.PRIORITY else None,
        slo_class=held.slo_class,
        # A server of text chats starts a new message if it cannot continue one.
        resumable=held.request is None
        or (held.request.sampling.resumable and not (held.output.text and isinstance(held.request.prompt, ChatPrompt))),
        displacements=max(0, pulled.attempt - 1 - pulled.failed_attempts),
        failed=pulled.failed_attempts,
        predicted_tokens=held.length_guess.expected_tokens if held.length_guess is not None and held.length_guess.by_model else 0,
    )


def read_head(head: HeadGroup | None) -> QueueHead | None:
    """The machine's view of the head of the virtual queue. A group whose record lacks its SLO has no deadline."""
    if head is None:
        return None
    meta = head.meta
    priority = meta.get("priority", "") if meta.get("slo_kind") == SloKind.PRIORITY else ""
    return QueueHead(
        group_id=head.group_id,
        model=head.model,
        waiting=head.waiting,
        waiting_prompt_tokens=head.waiting_prompt_tokens,
        first_deadline_s=head.first_deadline_s,
        first_token=meta.get("slo_kind") == SloKind.FIRST_TOKEN,
        priority=int(priority) if priority.removeprefix("-").isdecimal() else None,
        slo_class=meta.get("slo_class", ""),
    )


def read_behind(group: GroupBehind) -> WaitingGroup:
    return WaitingGroup(
        model=group.model,
        slo_class=group.slo_class,
        first_token=group.slo_kind == SloKind.FIRST_TOKEN,
        waiting=group.waiting,
        first_deadline_s=group.first_deadline_s,
    )


def _refusal(message: request_pb2.Request, slo: Slo | None) -> str:
    """Why the stored body is not one that a gateway accepts, "" if it is."""
    if not message.model:
        return "the stored request cannot be read"
    if message.WhichOneof("prompt") is None:
        return "the stored request has no prompt"
    if message.admission.prompt_tokens < 1 or message.admission.output_tokens_max < 1 or slo is None:
        return "the stored request was not admitted by a gateway"
    try:
        if message.HasField("chat"):
            chat_from_proto(message)
    except InvalidRequest as error:
        return f"the stored request cannot be read: {error.message}"
    return ""


def _slo(message: request_pb2.Request) -> Slo | None:
    slo = message.admission.slo
    kind = SLO_KINDS.get(slo.kind)
    if kind is None:
        return None
    if kind is SloKind.PRIORITY:
        return Slo(kind=kind, priority=slo.priority)
    return Slo(kind=kind, seconds=slo.seconds) if math.isfinite(slo.seconds) and slo.seconds > 0.0 else None


def _engine_request(message: request_pb2.Request, pulled: Pulled, output: HeldOutput, deadline_s: float, band: int) -> EngineRequest:
    return EngineRequest(
        run_id=run_id_of(pulled.queue_id, pulled.attempt),
        model=message.model,
        prompt=_prompt(message),
        prompt_tokens=message.admission.prompt_tokens,
        output_tokens_max=message.admission.output_tokens_max,
        produced=output.token_ids,
        produced_pieces=output.pieces,
        sampling=_sampling(message.sampling),
        arrival=pulled.acceptance_number,
        deadline_s=deadline_s,
        priority=band,
    )


def _prompt(message: request_pb2.Request) -> Prompt:
    match message.WhichOneof("prompt"):
        case "tokens":
            return TokenPrompt(ids=tuple(message.tokens.ids))
        case "chat":
            return chat_from_proto(message)
        case _:
            return TextPrompt(text=message.text, control_tokens=message.control_tokens_in_text)


def _sampling(params: request_pb2.SamplingParams) -> Sampling:
    return Sampling(
        temperature=params.temperature if params.HasField("temperature") else None,
        top_p=params.top_p if params.HasField("top_p") else None,
        top_k=params.top_k,
        min_p=params.min_p,
        stop=tuple(params.stop),
        seed=params.seed if params.HasField("seed") else None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else None,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        json_schema=params.json_schema,
        regex=params.regex,
    )
