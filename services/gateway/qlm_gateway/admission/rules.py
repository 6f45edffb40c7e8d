"""Admission: whether a request may enter the queue, and as what. Pure; the rules are the comments of request.proto.

Two steps, because counting tokens costs time in between: `check` needs nothing but the message, `admit` the prompt's tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qlm_core.vocabulary.errors import InvalidRequest, NotFound, invalid_field
from qlm_core.vocabulary.name_rules import DEFAULT_TENANT, REQUEST_ID_BYTES_MAX, check_application, check_name, checked_tenant
from qlm_core.vocabulary.request import RequestKey, Slo
from qlm_core.vocabulary.slo_rules import check_seconds, checked_slo
from qlm_gateway.admission.catalogue import ModelEntry
from qlm_gateway.admission.drafts import RequestDraft, SamplingDraft, SloDraft

EXPIRY_S_MAX = 365 * 86_400.0
STOP_STRINGS_MAX = 16
STOP_BYTES_MAX = 256
STRUCTURE_BYTES_MAX = 65_536
LOGPROBS_MAX = 20
LOGPROB_VALUES_MAX = 1 << 20
"""Log probabilities with one answer, (logprobs + 1) * its most tokens: some 9 MB of queue memory and of a result."""
MESSAGES_MAX = 4_096
IDS_AT_ONCE = 65_536
"""Token ids of a prompt are checked in parts, between which another thread may run."""
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Settings of admission. `default_slo`: for requests that name none."""

    default_slo: Slo
    prompt_bytes_max: int = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that may be accepted, with defaults applied."""

    key: RequestKey
    slo: Slo
    prompt_tokens: int
    output_tokens_max: int
    expire_after_s: float | None


def check(draft: RequestDraft, catalogue: Mapping[str, ModelEntry], limits: AdmissionLimits) -> ModelEntry:
    """All rules that do not need the number of prompt tokens; returns the model. Raises InvalidRequest, NotFound."""
    entry = model_of(draft.model, catalogue)
    checked_tenant(draft.tenant)
    if draft.request_id:
        check_name("request_id", draft.request_id, REQUEST_ID_BYTES_MAX)
    check_application(draft.application)
    if draft.expire_after_s is not None:
        check_seconds("expire_after_s", draft.expire_after_s, EXPIRY_S_MAX)
    _check_prompt(draft, entry, limits)
    if draft.sampling is not None:
        _check_sampling(draft.sampling)
    if draft.slo is not None:
        slo_of(draft.slo)
    return entry


def admit(
    draft: RequestDraft, entry: ModelEntry, prompt_tokens: int, limits: AdmissionLimits, new_request_id: Callable[[], str]
) -> Admitted:
    """The rest, with the prompt's tokens known. Raises InvalidRequest, with EMPTY_PROMPT or PROMPT_TOO_LONG for the prompt."""
    context_tokens_max = entry.spec.context_tokens_max
    if prompt_tokens < 1:
        raise empty_prompt()
    if prompt_tokens >= context_tokens_max:
        raise _too_long(prompt_tokens, context_tokens_max)
    room_tokens = context_tokens_max - prompt_tokens
    requested_tokens = draft.sampling.max_tokens if draft.sampling is not None else 0
    output_tokens_max = min(requested_tokens, room_tokens) if requested_tokens else room_tokens
    logprobs = None if draft.sampling is None else draft.sampling.logprobs
    if logprobs is not None and (logprobs + 1) * output_tokens_max > LOGPROB_VALUES_MAX:
        raise invalid_field("sampling.logprobs", f"with max_tokens of at most {LOGPROB_VALUES_MAX // (logprobs + 1)}", logprobs)
    return Admitted(
        key=RequestKey(draft.tenant or DEFAULT_TENANT, draft.request_id or new_request_id()),
        slo=limits.default_slo if draft.slo is None else slo_of(draft.slo),
        prompt_tokens=prompt_tokens,
        output_tokens_max=output_tokens_max,
        expire_after_s=draft.expire_after_s,
    )


def request_key(tenant: str, request_id: str) -> RequestKey:
    """The key that a client names an accepted request by. Raises InvalidRequest."""
    key = RequestKey(checked_tenant(tenant), request_id)
    check_name("request_id", request_id, REQUEST_ID_BYTES_MAX)
    return key


def model_of(name: str, catalogue: Mapping[str, ModelEntry]) -> ModelEntry:
    """The catalogue's entry. Raises InvalidRequest for "", NotFound UNKNOWN_MODEL."""
    if not name:
        raise invalid_field("model", "the name of a served model (see ListModels)")
    entry = catalogue.get(name)
    if entry is None:
        raise NotFound(f"model {name[:128]!r} is not served here (see ListModels)", reason="UNKNOWN_MODEL", details={"model": name})
    return entry


def slo_of(draft: SloDraft) -> Slo:
    """A checked SLO. Raises InvalidRequest."""
    return checked_slo(draft.kind, draft.seconds, draft.priority)


def empty_prompt() -> InvalidRequest:
    return InvalidRequest("prompt: must hold at least one token", reason="EMPTY_PROMPT", details={"field": "prompt"})


def _too_long(prompt_tokens: int, context_tokens_max: int) -> InvalidRequest:
    return InvalidRequest(
        f"prompt: has {prompt_tokens} tokens or more; the model's context holds {context_tokens_max} with the output",
        reason="PROMPT_TOO_LONG",
        details={"prompt_tokens": str(prompt_tokens), "context_tokens_max": str(context_tokens_max)},
    )


def _check_prompt(draft: RequestDraft, entry: ModelEntry, limits: AdmissionLimits) -> None:
    if draft.token_ids is not None:
        if not draft.token_ids:
            raise empty_prompt()
        if len(draft.token_ids) >= entry.spec.context_tokens_max:
            raise _too_long(len(draft.token_ids), entry.spec.context_tokens_max)
        last = draft.token_ids[-1]
        # Only the last id may state the answer's length.
        length = len(draft.token_ids) - 1
        before = (draft.token_ids[start : min(start + IDS_AT_ONCE, length)] for start in range(0, length, IDS_AT_ONCE))
        if any(max(ids) >= entry.spec.vocabulary_size for ids in before) or not entry.admits_token(last):
            raise invalid_field("tokens.ids", f"below the model's vocabulary size, {entry.spec.vocabulary_size}")
        return
    if draft.chat is not None:
        if len(draft.chat.messages) > MESSAGES_MAX:
            raise invalid_field("chat.messages", f"at most {MESSAGES_MAX}")
        if not any(message["content"] or len(message) > 2 for message in draft.chat.messages):
            raise empty_prompt()
        if any(message["role"] not in ROLES for message in draft.chat.messages):
            raise invalid_field("chat.messages.role", f"one of {', '.join(ROLES)}")
    elif not draft.text:
        raise empty_prompt()
    prompt_bytes = len(draft.plain_text().encode())
    if prompt_bytes > limits.prompt_bytes_max:
        raise invalid_field("prompt", f"at most {limits.prompt_bytes_max} bytes")
    # So many tokens there are at least: a hopeless prompt is refused before anyone tokenizes it.
    tokens_min = -(-prompt_bytes // entry.token_bytes_max)
    if tokens_min >= entry.spec.context_tokens_max:
        raise _too_long(tokens_min, entry.spec.context_tokens_max)


def _check_sampling(sampling: SamplingDraft) -> None:
    _check_range("temperature", sampling.temperature, 0.0, 2.0)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check_range("logprobs", sampling.logprobs, 0, LOGPROBS_MAX)
    if sampling.top_p is not None and not 0.0 < sampling.top_p <= 1.0:
        raise invalid_field("sampling.top_p", "above 0 and at most 1", sampling.top_p)
    if sampling.repetition_penalty is not None and not 0.0 < sampling.repetition_penalty < math.inf:
        raise invalid_field("sampling.repetition_penalty", "above 0 and finite", sampling.repetition_penalty)
    if len(sampling.stop) > STOP_STRINGS_MAX:
        raise invalid_field("sampling.stop", f"at most {STOP_STRINGS_MAX} strings", len(sampling.stop))
    if any(not 1 <= len(text.encode()) <= STOP_BYTES_MAX for text in sampling.stop):
        raise invalid_field("sampling.stop", f"strings of 1 to {STOP_BYTES_MAX} bytes")
    if sampling.regex is not None and not 1 <= len(sampling.regex.encode()) <= STRUCTURE_BYTES_MAX:
        raise invalid_field("sampling.regex", f"1 to {STRUCTURE_BYTES_MAX} bytes")
    if sampling.json_schema is not None:
        _check_json_schema(sampling.json_schema)


def _check_range(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:  # False for NaN
        raise invalid_field(f"sampling.{name}", f"from {least:g} to {most:g}", value)


def _check_json_schema(text: str) -> None:
    rule = f"a JSON schema (an object or a boolean) of at most {STRUCTURE_BYTES_MAX} bytes"
    if len(text.encode()) > STRUCTURE_BYTES_MAX:
        raise invalid_field("sampling.json_schema", rule)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_field("sampling.json_schema", rule) from error
    if not isinstance(schema, (dict, bool)):
        raise invalid_field("sampling.json_schema", rule)
