"""Between the SDK's plain values and the messages of the API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from qlm import values
from qlm.api.v1 import gateway_pb2, prediction_pb2, request_pb2
from qlm_core.vocabulary.errors import invalid_field

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages: mappings with "role", "content" (text) and perhaps other fields, such as "tool_calls", that the
model's chat template reads."""

AnyMessage = TypeVar("AnyMessage", bound=Message)

RULES = {
    FieldDescriptor.CPPTYPE_STRING: "text that UTF-8 can encode",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number from 0 to 4,294,967,295",
    FieldDescriptor.CPPTYPE_INT32: "a whole number of 32 bits",
    FieldDescriptor.CPPTYPE_INT64: "a whole number of 64 bits",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
}

STATES: Mapping[int, values.RequestState] = {
    request_pb2.REQUEST_STATE_ACCEPTED: values.RequestState.ACCEPTED,
    request_pb2.REQUEST_STATE_PLACED: values.RequestState.PLACED,
    request_pb2.REQUEST_STATE_RUNNING: values.RequestState.RUNNING,
    request_pb2.REQUEST_STATE_COMPLETED: values.RequestState.COMPLETED,
    request_pb2.REQUEST_STATE_FAILED: values.RequestState.FAILED,
    request_pb2.REQUEST_STATE_CANCELLED: values.RequestState.CANCELLED,
    request_pb2.REQUEST_STATE_EXPIRED: values.RequestState.EXPIRED,
}
STATE_NUMBERS: Mapping[values.RequestState, int] = {state: number for number, state in STATES.items()}
SLO_KINDS: Mapping[str, request_pb2.SloKind.ValueType] = {
    "completion": request_pb2.SLO_KIND_COMPLETION,
    "first_token": request_pb2.SLO_KIND_FIRST_TOKEN,
    "priority": request_pb2.SLO_KIND_PRIORITY,
}
SLO_KIND_NAMES: Mapping[int, str] = {number: name for name, number in SLO_KINDS.items()}
FINISH_REASONS: Mapping[int, str] = {request_pb2.FINISH_REASON_STOP: "stop", request_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters by their names in request.proto; None or empty: the model's default. `stop`: one string or several."""

    max_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    stop: str | Sequence[str] = ()
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
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_variables: Mapping[str, Any] | None = None,
    control_tokens_in_text: bool = False,
) -> request_pb2.Request:
    """The message of a request, without trace context. Raises InvalidRequest for what no message can hold."""
    message = filled(
        request_pb2.Request(),
        model=model,
        tenant=tenant,
        application=application,
        request_id=request_id,
        expire_after_s=expire_after_s,
        expected_output_tokens=expected_output_tokens,
        control_tokens_in_text=control_tokens_in_text,
    )
    variables = {**(chat_variables or {}), **({} if tools is None else {"tools": list(tools)})}
    _put_prompt(message, prompt, continue_final_message=continue_final_message, variables_json=_json("chat_variables, tools", variables))
    if sampling != Sampling():
        message.sampling.CopyFrom(_sampling_message(sampling))
    if slo is not None:
        if slo.kind not in SLO_KINDS:
            raise invalid_field("slo.kind", f"one of {', '.join(SLO_KINDS)}")
        message.slo.kind = SLO_KINDS[slo.kind]
        filled(message.slo, "slo.", seconds=slo.seconds, priority=slo.priority)
    return message


def filled(message: AnyMessage, prefix: str = "", **fields: object) -> AnyMessage:
    """The message with these fields, None for absent. Raises InvalidRequest for a value that a field cannot hold; `prefix`: of its name."""
    for name, value in fields.items():
        if value is None:
            continue
        try:
            if isinstance(value, (list, tuple)):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except (TypeError, ValueError) as error:
            rule = RULES[message.DESCRIPTOR.fields_by_name[name].cpp_type]
            raise invalid_field(prefix + name, f"a list, each {rule}" if isinstance(value, (list, tuple)) else rule) from error
    return message


def _put_prompt(message: request_pb2.Request, prompt: Prompt, **chat: object) -> None:
    if isinstance(prompt, str):
        filled(message, text=prompt)
        return
    parts = _listed("prompt", prompt, "text, token ids or chat messages")
    if not parts or not isinstance(parts[0], Mapping):
        message.tokens.SetInParent()
        filled(message.tokens, "prompt.", ids=parts)
        return
    filled(message.chat, "prompt.", **chat)
    for turn in parts:
        role, content = (turn.get("role"), turn.get("content") or "") if isinstance(turn, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise invalid_field("prompt", 'chat messages, each a mapping with "role" and "content", both text')
        more = {name: value for name, value in turn.items() if name not in ("role", "content")}
        filled(message.chat.messages.add(), "prompt.", role=role, content=content, more_json=_json("prompt", more))


def _json(field: str, value: Mapping[str, Any]) -> str:
    """ "" for an empty one."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if value else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid_field(field, f"values that JSON has ({error})") from error


def _sampling_message(sampling: Sampling) -> request_pb2.SamplingParams:
    fields = {field.name: getattr(sampling, field.name) for field in fields_of(sampling)}
    if sampling.json_schema is not None and sampling.regex is not None:
        raise invalid_field("sampling.regex", "absent beside json_schema")
    fields["stop"] = (
        [sampling.stop] if isinstance(sampling.stop, str) else _listed("sampling.stop", sampling.stop, "a string or a list of strings")
    )
    return filled(request_pb2.SamplingParams(), "sampling.", **fields)


def _listed(field: str, value: object, rule: str) -> list[Any]:
    if isinstance(value, (bytes, bytearray, memoryview, Mapping, Set)) or not isinstance(value, Iterable):
        raise invalid_field(field, f"{rule}, not {type(value).__name__}")
    return list(value)


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
        paused=message.paused,
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
        state=STATES[message.state],
        prediction=prediction_value(message.prediction) if message.HasField("prediction") else None,
        paused=message.paused,
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
            placed_s=timing.placed_s,
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
        pauses=tuple(values.Pause(model=each.model, tenant=each.tenant, since_s=each.since_s) for each in message.pauses),
        loss=message.loss,
        held=tuple(values.HeldBytes(bound=each.bound, name=each.name, held=each.held, limit=each.limit) for each in message.held),
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
        model=message.model,
        error_reason=message.error.reason,
        error_message=message.error.message,
        finished_s=message.finished_s if message.HasField("finished_s") else None,
        paused=message.paused,
    )


def request_page_value(message: gateway_pb2.ListRequestsResponse) -> values.RequestPage:
    return values.RequestPage(
        requests=tuple(
            values.ListedRequest(
                tenant=request.tenant,
                request_id=request.request_id,
                queue_id=request.queue_id,
                model=request.model,
                state=STATES[request.state],
                slo_class=request.slo_class,
                accepted_s=request.accepted_s,
                deadline_s=request.deadline_s if request.HasField("deadline_s") else None,
                instance=request.instance,
                attempts=request.attempts,
            )
            for request in message.requests
        ),
        next_after=message.next_after,
        now_s=message.now_s,
    )
