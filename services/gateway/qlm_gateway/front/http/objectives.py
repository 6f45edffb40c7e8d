"""Objectives of a call: the headers `x-qlm-slo-seconds`, `x-qlm-slo-kind` and `x-qlm-priority`, else the service tier."""

from __future__ import annotations

from collections.abc import Mapping

from qlm.api.v1.request_pb2 import Slo, SloKind
from qlm_core.errors import invalid_field
from qlm_core.slo_rules import PRIORITY_MAX
from qlm_gateway.front.http.settings import HttpSettings

SECONDS = "x-qlm-slo-seconds"
KIND = "x-qlm-slo-kind"
PRIORITY = "x-qlm-priority"
_KINDS = {"completion": SloKind.SLO_KIND_COMPLETION, "first_token": SloKind.SLO_KIND_FIRST_TOKEN}


def objective_of(headers: Mapping[str, str], tier: str | None, settings: HttpSettings) -> tuple[Slo | None, str]:
    """The SLO, None for the gateway's default, and the tier that the answer names. Headers win over the tier, which is "default" then.
    Raises InvalidRequest."""
    seconds, kind, priority = headers.get(SECONDS), headers.get(KIND), headers.get(PRIORITY)
    if seconds is not None and priority is not None:
        raise invalid_field(PRIORITY, f"absent with {SECONDS}")
    if kind is not None and (kind not in _KINDS or seconds is None):
        raise invalid_field(KIND, f"{' or '.join(_KINDS)}, and with {SECONDS}")
    if seconds is not None:
        return Slo(kind=_KINDS[kind or "completion"], seconds=_number(seconds)), "default"
    if priority is not None:
        return Slo(kind=SloKind.SLO_KIND_PRIORITY, priority=_priority(priority)), "default"
    if tier == "priority":
        return Slo(kind=SloKind.SLO_KIND_COMPLETION, seconds=settings.priority_slo_s), tier
    if tier == "flex":
        return Slo(kind=SloKind.SLO_KIND_COMPLETION, seconds=settings.flex_slo_s), tier
    return None, "default"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise invalid_field(SECONDS, "a number") from None


def _priority(text: str) -> int:
    try:
        priority = int(text)
    except ValueError:
        priority = PRIORITY_MAX + 1
    if abs(priority) > PRIORITY_MAX:
        raise invalid_field(PRIORITY, f"a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}")
    return priority
