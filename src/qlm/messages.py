"""Between the SDK's plain values and the messages of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlm import values
from qlm.api.v1 import gateway_pb2, prediction_pb2, request_pb2
from qlm.errors import InvalidRequest

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages: mappings with "role" and "content"."""

STATES: Mapping[int, values.RequestState] = {
    request_pb2.REQUEST_STATE_ACCEPTED: values.RequestState.ACCEPTED,
    request_pb2.REQUEST_STATE_PLACED: values.RequestState.PLACED,
    request_pb2.REQUEST_STATE_RUNNING: values.RequestState.RUNNING,
    request_pb2.REQUEST_STATE_COMPLETED: values.RequestState.COMPLETED,
    request_pb2.REQUEST_STATE_FAILED: values.RequestState.FAILED,
    request_pb2.REQUEST_STATE_CANCELLED: values.RequestState.CANCELLED,
    request_pb2.REQUEST_STATE_EXPIRED: values.RequestState.EXPIRED,
}
SLO_KINDS: Mapping[str, request_pb2.SloKind.ValueType] = {
    "completion": request_pb2.SLO_KIND_COMPLETION,
    "first_token": request_pb2.SLO_KIND_FIRST_TOKEN,
    "priority": request_pb2.SLO_KIND_PRIORITY,
}
SLO_KIND_NAMES: Mapping[int, str] = {number: name for name, number in SLO_KINDS.items()}
FINISH_REASONS: Mapping[int, str] = {request_pb2.FINISH_REASON_STOP: "stop", request_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters by their names in request.proto; None or empty: the model's default."""

    max_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    stop: Sequence[str] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None


def request_message(
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    *,
    slo: values.Slo | None,
    tenant: str,
    application: str,
    request_id: str,
    expire_after_s: float | None,
    expected_output_tokens: int = 0,
) -> request_pb2.Request:
    """The message of a request, without trace context. Raises InvalidRequest for what no message can hold."""
    try:
        message = request_pb2.Request(
            model=model,
            tenant=tenant,
            application=application,
            request_id=request_id,
            expire_after_s=expire_after_s,
            expected_output_tokens=expected_output_tokens,
        )
        _put_prompt(message, prompt)
        if sampling != Sampling():
            message.sampling.CopyFrom(_sampling_message(sampling))
        if slo is not None:
            message.slo.CopyFrom(_slo_message(slo))
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}", details={"field": "request", "rule": str(error)}) from error
    return message


def _put_prompt(message: request_pb2.Request, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        turns = [request_pb2.ChatMessage(**turn) for turn in prompt]  # type: ignore[arg-type]
        message.chat.messages.extend(turns)
    else:
        message.tokens.CopyFrom(request_pb2.TokenPrompt(ids=prompt))  # type: ignore[arg-type]


def _sampling_message(sampling: Sampling) -> request_pb2.SamplingParams:
    message = request_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=sampling.stop,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
    )
    if sampling.json_schema is not None and sampling.regex is not None:
        raise ValueError("at most one of json_schema and regex")
    if sampling.json_schema is not None:
        message.json_schema = sampling.json_schema
    if sampling.regex is not None:
        message.regex = sampling.regex
    return message


def _slo_message(slo: values.Slo) -> request_pb2.Slo:
    return request_pb2.Slo(kind=SLO_KINDS[slo.kind], seconds=slo.seconds, priority=slo.priority)


def accepted_value(message: gateway_pb2.Accepted) -> values.Accepted:
    return values.Accepted(
        tenant=message.tenant,
        request_id=message.request_id,
        queue_id=message.queue_id,
        duplicate=message.duplicate,
        state=STATES[message.state],
        accepted_s=message.accepted_s,
        prompt_tokens=message.prompt_tokens,
        prediction=prediction_value(message.prediction) if message.HasField("prediction") else None,
    )


def prediction_value(message: prediction_pb2.Prediction) -> values.Prediction:
    return values.Prediction(
        wait_p50_s=message.wait_p50_s,
        wait_p90_s=message.wait_p90_s,
        completion_p50_s=message.completion_p50_s,
        completion_p90_s=message.completion_p90_s,
        requests_ahead=message.requests_ahead,
        profile_version=message.profile_version,
        probability_late=message.probability_late if message.HasField("probability_late") else None,
    )


def outlook_value(message: gateway_pb2.Outlook) -> values.Outlook:
    return values.Outlook(
        state=STATES[message.state], prediction=prediction_value(message.prediction) if message.HasField("prediction") else None
    )


def slo_value(message: request_pb2.Slo) -> values.Slo:
    return values.Slo(kind=SLO_KIND_NAMES.get(message.kind, ""), seconds=message.seconds, priority=message.priority)


def chunk_value(message: gateway_pb2.TokenChunk) -> values.TokenChunk:
    return values.TokenChunk(
        offset=message.offset,
        token_ids=tuple(message.token_ids),
        pieces=tuple(message.pieces),
        text=message.text,
        logprobs=logprobs_value(message.logprobs) if message.HasField("logprobs") else (),
    )


def logprobs_value(message: request_pb2.Logprobs) -> tuple[values.TokenLogprobs, ...]:
    """One for each token."""
    top = len(message.top_token_ids) // len(message.of_token) if message.of_token else 0
    pairs = list(zip(message.top_token_ids, message.of_top, strict=True))
    return tuple(
        values.TokenLogprobs(of_token, tuple(pairs[place * top : (place + 1) * top])) for place, of_token in enumerate(message.of_token)
    )


def result_value(message: request_pb2.Result) -> values.Result:
    timing = message.timing
    return values.Result(
        tenant=message.tenant,
        request_id=message.request_id,
        queue_id=message.queue_id,
        model=message.model,
        state=STATES[message.state],
        finish_reason=FINISH_REASONS.get(message.finish_reason, ""),
        error_reason=message.error.reason,
        error_message=message.error.message,
        prompt_tokens=message.usage.prompt_tokens,
        output_tokens=message.usage.output_tokens,
        attempts=message.attempts,
        incarnation=message.incarnation,
        timing=values.Timing(
            accepted_s=timing.accepted_s,
            started_s=timing.started_s,
            first_token_s=timing.first_token_s,
            finished_s=timing.finished_s,
        ),
        token_ids=tuple(message.output_token_ids),
        pieces=tuple(message.output_pieces),
        text=message.output_text,
        logprobs=logprobs_value(message.logprobs) if message.HasField("logprobs") else (),
    )


def model_value(message: gateway_pb2.Model) -> values.ModelInfo:
    return values.ModelInfo(
        name=message.name,
        context_tokens_max=message.context_tokens_max,
        token_count=message.token_count,
        instances=message.instances,
    )


def queue_status_value(message: gateway_pb2.QueueStatusResponse) -> values.QueueStatus:
    return values.QueueStatus(
        queue=message.queue,
        live=message.live,
        unplaced=message.unplaced,
        running=message.running,
        virtual_queues=tuple(_virtual_queue_value(queue) for queue in message.virtual_queues),
        request=_request_status_value(message.request) if message.HasField("request") else None,
        planner=message.planner,
        refusal=message.refusal,
        damage_count=message.damage_count,
    )


def _virtual_queue_value(message: gateway_pb2.VirtualQueueStatus) -> values.VirtualQueueStatus:
    return values.VirtualQueueStatus(
        instance=message.instance,
        version=message.version,
        groups=tuple(
            values.GroupStatus(
                group_id=group.group_id,
                model=group.model,
                slo_kind=SLO_KIND_NAMES.get(group.slo_kind, ""),
                slo_class=group.slo_class,
                waiting=group.waiting,
                first_deadline_s=group.first_deadline_s,
            )
            for group in message.groups
        ),
        running=message.running,
        alive=message.alive,
        active_model=message.active_model,
    )


def _request_status_value(message: gateway_pb2.RequestStatus) -> values.RequestStatus:
    return values.RequestStatus(
        state=STATES[message.state],
        queue_id=message.queue_id,
        group_id=message.group_id,
        instance=message.instance,
        requests_ahead=message.requests_ahead if message.HasField("requests_ahead") else None,
        output_tokens=message.output_tokens,
        attempts=message.attempts,
        accepted_s=message.accepted_s,
        prediction=prediction_value(message.prediction) if message.HasField("prediction") else None,
        slo=slo_value(message.slo) if message.HasField("slo") else None,
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
    )
