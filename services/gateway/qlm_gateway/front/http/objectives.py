"""Objectives of a call: the headers `x-qlm-slo-seconds`, `x-qlm-slo-kind` and `x-qlm-priority`, else those of llm-d, else vLLM's field
`priority`, else the service tier. And its expiry, by a header of llm-d."""

from __future__ import annotations

import re
from collections.abc import Mapping

from qlm.api.v1.request_pb2 import Slo, SloKind
from qlm_core.vocabulary.errors import invalid_field
from qlm_core.vocabulary.slo_rules import PRIORITY_MAX
from qlm_gateway.front.http.settings import HttpSettings

SECONDS = "x-qlm-slo-seconds"
KIND = "x-qlm-slo-kind"
PRIORITY = "x-qlm-priority"
LLM_D_TTFT_MS = "x-llm-d-slo-ttft-ms"
LLM_D_TPOT_MS = "x-llm-d-slo-tpot-ms"
"""A bound of each output token after the first: with the other and with `max_tokens` it bounds the whole answer."""
LLM_D_OBJECTIVE = "x-llm-d-inference-objective"
LLM_D_TTL = "x-llm-d-inference-ttl"
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(h|ms|m|s|us|ns)")
_DURATION_CHARACTERS_MAX = 64
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_KINDS = {"completion": SloKind.SLO_KIND_COMPLETION, "first_token": SloKind.SLO_KIND_FIRST_TOKEN}


def objective_of(
    headers: Mapping[str, str], tier: str | None, settings: HttpSettings, *, priority: int | None = None, output_tokens: int | None = None
) -> tuple[Slo | None, str, str]:
    """The SLO, None for the gateway's default; the tier that the answer names: "default" where something else than a tier sets the
    objective; and the header or field that sets it. `priority`: the body's; `output_tokens`: at most. Raises InvalidRequest."""
    seconds, kind, strict = headers.get(SECONDS), headers.get(KIND), headers.get(PRIORITY)
    if seconds is not None and strict is not None:
        raise invalid_field(PRIORITY, f"absent with {SECONDS}")
    if kind is not None and (kind not in _KINDS or seconds is None):
        raise invalid_field(KIND, f"{' or '.join(_KINDS)}, and with {SECONDS}")
    if seconds is not None:
        return Slo(kind=_KINDS[kind or "completion"], seconds=_number(SECONDS, seconds)), "default", SECONDS
    if strict is not None:
        return Slo(kind=SloKind.SLO_KIND_PRIORITY, priority=_priority(PRIORITY, strict)), "default", PRIORITY
    if LLM_D_TTFT_MS in headers:
        return _llm_d(headers, output_tokens), "default", LLM_D_TTFT_MS
    if higher_first := settings.objectives.get(headers.get(LLM_D_OBJECTIVE, ""), 0):
        return Slo(kind=SloKind.SLO_KIND_PRIORITY, priority=-higher_first), "default", LLM_D_OBJECTIVE
    if priority is not None:
        return Slo(kind=SloKind.SLO_KIND_PRIORITY, priority=_priority("priority", str(priority))), "default", "priority"
    if tier == "priority":
        return Slo(kind=SloKind.SLO_KIND_COMPLETION, seconds=settings.priority_slo_s), tier, "service_tier"
    if tier == "flex":
        return Slo(kind=SloKind.SLO_KIND_COMPLETION, seconds=settings.flex_slo_s), tier, "service_tier"
    return None, "default", "service_tier"


def expiry_s_of(headers: Mapping[str, str]) -> float | None:
    """Seconds from acceptance after which the request expires, by llm-d's header: a duration as Go writes it. Raises InvalidRequest."""
    text = headers.get(LLM_D_TTL)
    if text is None:
        return None
    parts = _DURATION.findall(text) if len(text) <= _DURATION_CHARACTERS_MAX else []
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if not seconds or "".join(map("".join, parts)) != text:
        raise invalid_field(LLM_D_TTL, "a duration above 0, such as 1500ms or 1m30s")
    return seconds


def _llm_d(headers: Mapping[str, str], output_tokens: int | None) -> Slo:
    first_s = _number(LLM_D_TTFT_MS, headers[LLM_D_TTFT_MS]) / 1e3
    if LLM_D_TPOT_MS not in headers or not output_tokens:
        return Slo(kind=SloKind.SLO_KIND_FIRST_TOKEN, seconds=first_s)
    token_s = _number(LLM_D_TPOT_MS, headers[LLM_D_TPOT_MS]) / 1e3
    return Slo(kind=SloKind.SLO_KIND_COMPLETION, seconds=first_s + (output_tokens - 1) * token_s)


def _number(header: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise invalid_field(header, "a number") from None


def _priority(field: str, text: str) -> int:
    try:
        priority = int(text)
    except ValueError:
        priority = PRIORITY_MAX + 1
    if abs(priority) > PRIORITY_MAX:
        raise invalid_field(field, f"a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}")
    return priority
