"""Admission: every rule of request.proto, at its border."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import InvalidRequest, NotFound
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import RequestKey, Slo, SloKind
from qlm_core.vocabulary.simulated_model import ANSWER_TOKENS_MAX, LENGTH_TOKEN_BASE
from qlm_gateway.admission.catalogue import ModelEntry
from qlm_gateway.admission.drafts import RequestDraft, SamplingDraft, SloDraft
from qlm_gateway.admission.rules import IDS_AT_ONCE, AdmissionLimits, Admitted, admit, check, request_key, slo_of

CONTEXT = 100
VOCABULARY = 1_000
DEFAULT = Slo(kind=SloKind.COMPLETION, seconds=60.0)
LIMITS = AdmissionLimits(default_slo=DEFAULT, prompt_bytes_max=500)
SPEC = ModelSpec(name="m", profile="M", context_tokens_max=CONTEXT, vocabulary_size=VOCABULARY)
CATALOGUE = {
    "m": ModelEntry(spec=SPEC),
    "exact": ModelEntry(spec=replace(SPEC, name="exact"), exact=True, token_bytes_max=20),
}
GOOD = RequestDraft(model="m", text="hello")


def draft(**changes: Any) -> RequestDraft:
    return replace(GOOD, **changes)


def sampled(**changes: Any) -> RequestDraft:
    return replace(GOOD, sampling=SamplingDraft(**changes))


def slo(kind: int, seconds: float = 0.0, priority: int = 0) -> RequestDraft:
    return replace(GOOD, slo=SloDraft(kind=kind, seconds=seconds, priority=priority))


def chat(*turns: tuple[str, str]) -> ChatPrompt:
    return ChatPrompt(messages=tuple({"role": role, "content": content} for role, content in turns))


def tokens(*ids: int, model: str = "m") -> RequestDraft:
    return RequestDraft(model=model, token_ids=ids)


ADMITTED = {
    "text": GOOD,
    "chat": RequestDraft(model="m", chat=chat(("system", ""), ("user", "hi"))),
    "tokens": tokens(0, VOCABULARY - 1),
    "length token last": tokens(5, LENGTH_TOKEN_BASE + 7),
    "length token alone": tokens(LENGTH_TOKEN_BASE + ANSWER_TOKENS_MAX),
    "longest prompt": tokens(*([1] * (CONTEXT - 1))),
    "longest text": draft(text="x" * (4 * (CONTEXT - 1))),
    "tenant of 64": draft(tenant="t" * 64),
    "tenant with blanks and colons": draft(tenant="a b:{c}%"),
    "id of 128": draft(request_id="i" * 128),
    "application of 64": draft(application="é" * 32),
    "expiry": draft(expire_after_s=0.001),
    "completion": slo(1, 30 * 86_400.0),
    "first token": slo(2, 0.001),
    "priority": slo(3, 0.0, -1000),
    "greedy": sampled(temperature=0.0, top_p=1.0, min_p=1.0, presence_penalty=-2.0, frequency_penalty=2.0),
    "hot": sampled(temperature=2.0, top_p=1e-9, repetition_penalty=1e-9, presence_penalty=2.0, frequency_penalty=-2.0, logprobs=20),
    "stops": sampled(stop=("s" * 256,) * 16),
    "schema": sampled(json_schema='{"type": "object"}'),
    "longest schema": sampled(json_schema='{"a": "' + "x" * (65_536 - 9) + '"}'),
    "boolean schema": sampled(json_schema="true"),
    "regex": sampled(regex="a+"),
}

REFUSED: dict[str, tuple[RequestDraft, str]] = {
    "no model": (draft(model=""), "model"),
    "tenant of 65": (draft(tenant="t" * 65), "tenant"),
    "tenant not ASCII": (draft(tenant="é"), "tenant"),
    "tenant with a line end": (draft(tenant="a\n"), "tenant"),
    "id of 129": (draft(request_id="i" * 129), "request_id"),
    "id with NUL": (draft(request_id="a\0"), "request_id"),
    "application of 66": (draft(application="é" * 33), "application"),
    "unknown kind": (slo(99, 1.0), "slo.kind"),
    "no kind": (slo(0, 1.0), "slo.kind"),
    "no seconds": (slo(1), "slo.seconds"),
    "priority with seconds": (slo(3, 1.0), "slo.seconds"),
    "priority 1001": (slo(3, 0.0, 1001), "slo.priority"),
    "completion with priority": (slo(1, 1.0, 1), "slo.priority"),
    "repetition 0": (sampled(repetition_penalty=0.0), "sampling.repetition_penalty"),
    "repetition inf": (sampled(repetition_penalty=math.inf), "sampling.repetition_penalty"),
    "top_p 0": (sampled(top_p=0.0), "sampling.top_p"),
    "top_p above 1": (sampled(top_p=1.0001), "sampling.top_p"),
    "logprobs -1": (sampled(logprobs=-1), "sampling.logprobs"),
    "logprobs 21": (sampled(logprobs=21), "sampling.logprobs"),
    "17 stops": (sampled(stop=("s",) * 17), "sampling.stop"),
    "empty stop": (sampled(stop=("",)), "sampling.stop"),
    "long stop": (sampled(stop=("s" * 257,)), "sampling.stop"),
    "schema that is none": (sampled(json_schema="{"), "sampling.json_schema"),
    "schema that is a list": (sampled(json_schema="[]"), "sampling.json_schema"),
    "schema without end": (sampled(json_schema="[" * 60_000), "sampling.json_schema"),
    "long schema": (sampled(json_schema='{"a": "' + "x" * (65_536 - 8) + '"}'), "sampling.json_schema"),
    "empty regex": (sampled(regex=""), "sampling.regex"),
    "token beyond the vocabulary": (tokens(VOCABULARY), "tokens.ids"),
    "length token not last": (tokens(LENGTH_TOKEN_BASE + 7, 5), "tokens.ids"),
    "length token too long": (tokens(5, LENGTH_TOKEN_BASE + ANSWER_TOKENS_MAX + 1), "tokens.ids"),
    "length token of a real model": (tokens(5, LENGTH_TOKEN_BASE + 7, model="exact"), "tokens.ids"),
    "role": (RequestDraft(model="m", chat=chat(("boss", "hi"))), "chat.messages.role"),
    "messages": (RequestDraft(model="m", chat=chat(*[("user", "h")] * 4097)), "chat.messages"),
    "no more messages than allowed": (RequestDraft(model="m", chat=chat(*[("user", "h")] * 4096)), "prompt"),
    "prompt bytes": (draft(model="exact", text="x" * 501), "prompt"),
}


@pytest.mark.parametrize("name", ADMITTED)
def test_admitted(name: str) -> None:
    check(ADMITTED[name], CATALOGUE, LIMITS)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_field_and_its_rule(name: str) -> None:
    request, field = REFUSED[name]
    with pytest.raises(InvalidRequest) as refused:
        check(request, CATALOGUE, LIMITS)
    assert refused.value.reason == "INVALID_FIELD"
    assert refused.value.details["field"] == field
    assert refused.value.details["rule"]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 0.0, -0.0, 0.0009, 5e-324, 1e308])
@pytest.mark.parametrize("field", ["slo.seconds", "expire_after_s"])
def test_seconds_that_are_none(seconds: float, field: str) -> None:
    requests = [draft(expire_after_s=seconds)] if field == "expire_after_s" else [slo(1, seconds), slo(2, seconds)]
    for request in requests:
        with pytest.raises(InvalidRequest) as refused:
            check(request, CATALOGUE, LIMITS)
        assert refused.value.details["field"] == field


@pytest.mark.parametrize("field", ["temperature", "min_p", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.5, -2.5])
def test_sampling_out_of_range(field: str, value: float) -> None:
    if field == "repetition_penalty" and value == 2.5:
        return
    with pytest.raises(InvalidRequest) as refused:
        check(sampled(**{field: value}), CATALOGUE, LIMITS)
    assert refused.value.details["field"] == f"sampling.{field}"


def test_unknown_model() -> None:
    with pytest.raises(NotFound) as refused:
        check(draft(model="gpt"), CATALOGUE, LIMITS)
    assert refused.value.reason == "UNKNOWN_MODEL"
    assert refused.value.details == {"model": "gpt"}


@pytest.mark.parametrize(
    "request_",
    [draft(text=""), draft(text=None), tokens(), RequestDraft(model="m", chat=chat()), RequestDraft(model="m", chat=chat(("user", "")))],
)
def test_empty_prompts(request_: RequestDraft) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(request_, CATALOGUE, LIMITS)
    assert refused.value.reason == "EMPTY_PROMPT"


@pytest.mark.parametrize("request_", [tokens(*([1] * CONTEXT)), tokens(*([1] * (CONTEXT + 1))), draft(text="x" * (4 * (CONTEXT - 1) + 1))])
def test_prompts_that_leave_no_room_are_refused_before_they_are_tokenized(request_: RequestDraft) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(request_, CATALOGUE, LIMITS)
    assert refused.value.reason == "PROMPT_TOO_LONG"
    prompt_tokens = max(CONTEXT, len(request_.token_ids or ()))
    assert refused.value.details == {"prompt_tokens": str(prompt_tokens), "context_tokens_max": str(CONTEXT)}


def admitted(request: RequestDraft, prompt_tokens: int) -> Admitted:
    return admit(request, CATALOGUE["m"], prompt_tokens, LIMITS, lambda: "made")


def test_defaults_are_applied() -> None:
    assert admitted(GOOD, 10) == Admitted(
        key=RequestKey("default", "made"), slo=DEFAULT, prompt_tokens=10, output_tokens_max=90, expire_after_s=None
    )


@pytest.mark.parametrize(("requested", "given_"), [(0, 90), (1, 1), (90, 90), (91, 90), ((1 << 32) - 1, 90)])
def test_output_is_as_requested_where_it_fits(requested: int, given_: int) -> None:
    assert admitted(sampled(max_tokens=requested), 10).output_tokens_max == given_


@pytest.mark.parametrize(("logprobs", "most"), [(0, 1 << 20), (20, (1 << 20) // 21)])
def test_log_probabilities_are_bounded_with_the_output(logprobs: int, most: int) -> None:
    entry = replace(CATALOGUE["m"], spec=replace(CATALOGUE["m"].spec, context_tokens_max=1 << 21))
    ask = sampled(logprobs=logprobs, max_tokens=most)
    assert admit(ask, entry, 5, LIMITS, lambda: "made").output_tokens_max == most
    for too_many in (most + 1, 0):
        with pytest.raises(InvalidRequest) as refused:
            admit(sampled(logprobs=logprobs, max_tokens=too_many), entry, 5, LIMITS, lambda: "made")
        assert refused.value.details["field"] == "sampling.logprobs"
        assert refused.value.details["rule"].endswith(f" {most}")


def test_what_a_request_says_is_kept() -> None:
    said = admitted(replace(slo(2, 5.0), tenant="t", request_id="r", expire_after_s=9.0), 99)
    assert said.key == RequestKey("t", "r")
    assert said.slo == Slo(kind=SloKind.FIRST_TOKEN, seconds=5.0)
    assert (said.expire_after_s, said.output_tokens_max) == (9.0, 1)
    assert slo_of(SloDraft(kind=3, priority=-7)) == Slo(kind=SloKind.PRIORITY, priority=-7)


@pytest.mark.parametrize(("prompt_tokens", "reason"), [(0, "EMPTY_PROMPT"), (CONTEXT, "PROMPT_TOO_LONG"), (10**9, "PROMPT_TOO_LONG")])
def test_counted_prompts_that_do_not_fit(prompt_tokens: int, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        admitted(GOOD, prompt_tokens)
    assert refused.value.reason == reason


def test_keys_of_accepted_requests() -> None:
    assert request_key("", "r") == RequestKey("default", "r")
    for tenant, request_id in (("t", ""), ("t", "x" * 129), ("x" * 65, "r"), ("t\n", "r")):
        with pytest.raises(InvalidRequest):
            request_key(tenant, request_id)


INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


@given(seconds=st.floats(), priority=INT32, kind=INT32 | st.integers(0, 3))
def test_an_slo_is_sound_or_refused(seconds: float, priority: int, kind: int) -> None:
    try:
        found = slo_of(SloDraft(kind=kind, seconds=seconds, priority=priority))
    except InvalidRequest:
        return
    if found.kind is SloKind.PRIORITY:
        assert abs(found.priority) <= 1000
    else:
        assert 0.001 <= found.seconds <= 30 * 86_400


@pytest.mark.parametrize("place", [0, IDS_AT_ONCE - 1, IDS_AT_ONCE, 2 * IDS_AT_ONCE - 1, 2 * IDS_AT_ONCE])
def test_an_id_beyond_the_vocabulary_is_found_wherever_it_is(place: int) -> None:
    ids = [1] * (2 * IDS_AT_ONCE + 1)
    catalogue = {"m": ModelEntry(spec=replace(SPEC, context_tokens_max=1 << 20))}
    check(RequestDraft(model="m", token_ids=ids), catalogue, LIMITS)
    ids[place] = VOCABULARY
    with pytest.raises(InvalidRequest, match=r"tokens\.ids"):
        check(RequestDraft(model="m", token_ids=ids), catalogue, LIMITS)
