"""Request groups: requests alike in model, SLO kind and class, token class and tenant weight class (QLM section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.request import RequestFacts, Slo, SloKind


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class GroupKey:
    """What the requests of a group share. Several groups may share a key (see `Grouping` in the planner)."""

    model: str
    slo_kind: SloKind
    slo_class: str
    token_class: str
    tenant_class: str = "1"


def slo_class(slo: Slo) -> str:
    """The power of two of seconds that is at or above the SLO ("32s" for 20 s; "1/4s" below one), or "p<priority>"."""
    if slo.kind is SloKind.PRIORITY:
        return f"p{slo.priority}"
    exponent = math.ceil(math.log2(slo.seconds))
    return f"{2**exponent}s" if exponent >= 0 else f"1/{2**-exponent}s"


def token_class(prompt_tokens: int) -> str:
    """The power of four at or above the prompt's length: "256" for 65 to 256 tokens."""
    power = 1
    while power < prompt_tokens:
        power *= 4
    return str(power)


def group_key(request: RequestFacts) -> GroupKey:
    """The key of the group that a request may join."""
    return GroupKey(
        model=request.model,
        slo_kind=request.slo.kind,
        slo_class=slo_class(request.slo),
        token_class=token_class(request.prompt_tokens),
    )
