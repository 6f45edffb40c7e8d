"""Answers and chunks of the OpenAI API, from the messages of gateway.proto."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qlm.api.v1.gateway_pb2 import Accepted, Model, Outlook, RequestStatus
from qlm.api.v1.prediction_pb2 import Prediction
from qlm.api.v1.request_pb2 import FinishReason, Logprobs, RequestState, Result, Usage
from qlm_gateway.front.http.calls import Call

TextOf = Callable[[int], str]
"""The text of one token."""

LOGPROB_MIN = -9999.0
"""JSON has no infinity."""

_FINISH = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


def finish_reason(result: Result) -> str:
    return _FINISH.get(result.finish_reason, "stop")


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}


def usage_of(call: Call, usages: Sequence[Usage]) -> dict[str, int]:
    """Adds up the results of all choices; a prompt counts once."""
    prompts = usages[:: call.choices_per_prompt]
    return usage(sum(each.prompt_tokens for each in prompts), sum(each.output_tokens for each in usages))


def logprobs_of(logprobs: Logprobs, token_ids: Sequence[int], text_of: TextOf, *, chat: bool, text_offset: int = 0) -> dict[str, Any]:
    """Those of consecutive tokens. `text_offset`: characters of the output before them."""
    top = len(logprobs.top_token_ids) // len(logprobs.of_token) if logprobs.of_token else 0
    texts = [text_of(token) for token in token_ids]
    own_logprobs = [max(logprob, LOGPROB_MIN) for logprob in logprobs.of_token]
    best = [(text_of(token), max(logprob, LOGPROB_MIN)) for token, logprob in zip(logprobs.top_token_ids, logprobs.of_top, strict=True)]
    likeliest = [best[index * top : (index + 1) * top] for index in range(len(token_ids))]
    each = list(zip(texts, own_logprobs, likeliest, strict=True))
    if chat:
        content = [{**_logprob(text, own), "top_logprobs": [_logprob(*one) for one in ones]} for text, own, ones in each]
        return {"content": content, "refusal": None}
    offsets = []
    for text in texts:
        offsets.append(text_offset)
        text_offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": own_logprobs,
        "top_logprobs": [{**dict(ones), text: own} for text, own, ones in each] if top else None,
        "text_offset": offsets,
    }


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def choice(
    index: int, text: str, reason: str, logprobs: Mapping[str, Any] | None, *, chat: bool, message: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`message`: of a chat, in place of its text alone."""
    said = {"message": message or {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


def completion(
    *, request_id: str, created: int, model: str, tier: str, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, int], chat: bool
) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "service_tier": tier,
        "system_fingerprint": None,
        "choices": choices,
        "usage": usage,
    }


def result_document(result: Result, text_of: TextOf, *, chat: bool) -> dict[str, Any]:
    """The result of one request as a completion."""
    logprobs = None
    if result.HasField("logprobs"):
        logprobs = logprobs_of(result.logprobs, result.output_token_ids, text_of, chat=chat)
    return completion(
        request_id=result.request_id,
        created=int(result.timing.accepted_s),
        model=result.model,
        tier="default",
        choices=[choice(0, result.output_text, finish_reason(result), logprobs, chat=chat)],
        usage=usage(result.usage.prompt_tokens, result.usage.output_tokens),
        chat=chat,
    )


class ChunkForm:
    """Chunks of one call's stream, as JSON. Their shared part is rendered once."""

    def __init__(self, call: Call, created: int) -> None:
        self._chat = call.chat
        shared = {
            "id": call.request_id,
            "object": "chat.completion.chunk" if call.chat else "text_completion",
            "created": created,
            "model": call.model,
            "service_tier": call.tier,
            "system_fingerprint": None,
        }
        self._head = _compact(shared)[:-1]
        no_usage = ',"usage":null' if call.include_usage else ""
        self._starts = [f'{self._head}{no_usage},"choices":[{{"index":{index},' for index in range(len(call.requests))]

    def role(self, index: int) -> str:
        """The first chunk of a chat's choice."""
        return self._starts[index] + '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}'

    def text(self, index: int, text: str, logprobs: Mapping[str, Any] | None) -> str:
        said = f'"delta":{{"content":{json.dumps(text)}}}' if self._chat else f'"text":{json.dumps(text)}'
        also = "null" if logprobs is None else _compact(logprobs)
        return f'{self._starts[index]}{said},"logprobs":{also},"finish_reason":null}}]}}'

    def delta(self, index: int, delta: Mapping[str, Any]) -> str:
        """Returns the event for a delta of a chat with tools."""
        return f'{self._starts[index]}"delta":{_compact(delta)},"logprobs":null,"finish_reason":null}}]}}'

    def finish(self, index: int, reason: str) -> str:
        said = '"delta":{}' if self._chat else '"text":""'
        return f'{self._starts[index]}{said},"logprobs":null,"finish_reason":"{reason}"}}]}}'

    def usage(self, usage: Mapping[str, int]) -> str:
        """After all choices."""
        return f'{self._head},"choices":[],"usage":{_compact(usage)}}}'


def _compact(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))


def created_of(accepted: Accepted) -> int:
    """Seconds since the epoch at which the queue took a request, also of one that has ended since."""
    return int(accepted.queue_id.partition("-")[0]) // 1000


def state_name(state: RequestState.ValueType) -> str:
    return RequestState.Name(state).removeprefix("REQUEST_STATE_").lower()


def _span(p50: float, p90: float) -> dict[str, float]:
    return {"p50": round(p50, 3), "p90": round(p90, 3)}


def _predicted(prediction: Prediction | None) -> dict[str, Any]:
    if prediction is None:
        return {"estimated_wait_seconds": None, "estimated_completion_seconds": None}
    return {
        "estimated_wait_seconds": _span(prediction.wait_p50_s, prediction.wait_p90_s),
        "estimated_completion_seconds": _span(prediction.completion_p50_s, prediction.completion_p90_s),
    }


def outlook_comment(index: int, outlook: Outlook) -> str:
    """Position and expected times of a choice that waits."""
    prediction = outlook.prediction if outlook.HasField("prediction") else None
    ahead = None if prediction is None else prediction.requests_ahead
    return _compact({"index": index, "state": state_name(outlook.state), "position": ahead, **_predicted(prediction)})


def accepted_document(accepted: Accepted, model: str) -> dict[str, Any]:
    """A request that has just been enqueued."""
    prediction = accepted.prediction if accepted.HasField("prediction") else None
    return {
        "id": accepted.request_id,
        "object": "qlm.request",
        "state": state_name(accepted.state),
        "model": model,
        "created": created_of(accepted),
        "position": None if prediction is None else prediction.requests_ahead,
        **_predicted(prediction),
        "paused": accepted.paused,
    }


def status_document(request_id: str, status: RequestStatus, result: Mapping[str, Any] | None) -> dict[str, Any]:
    """A request as it is now. `result`: of one that has completed, as a chat completion."""
    return {
        "id": request_id,
        "object": "qlm.request",
        "state": state_name(status.state),
        "model": status.model,
        "created": int(status.accepted_s),
        "position": status.requests_ahead if status.HasField("requests_ahead") else None,
        **_predicted(status.prediction if status.HasField("prediction") else None),
        "paused": status.paused,
        "output_tokens": status.output_tokens,
        "attempts": status.attempts,
        "deadline": status.deadline_s if status.HasField("deadline_s") else None,
        "finished": status.finished_s if status.HasField("finished_s") else None,
        "error": {"code": status.error.reason.lower(), "message": status.error.message} if status.HasField("error") else None,
        "result": result,
    }


def model_document(model: Model) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": 0, "owned_by": "qlm", "max_model_len": model.context_tokens_max}


def models_document(models: Iterable[Model]) -> dict[str, Any]:
    return {"object": "list", "data": [model_document(model) for model in models]}
