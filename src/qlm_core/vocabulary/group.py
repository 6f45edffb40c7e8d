"""Request groups: requests alike in model, SLO kind and class, token class and tenant weight class (QLM section 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qlm_core.vocabulary.request import RequestFacts, Slo, SloKind

OUTPUT_MARK = "/o"
"""Between the two parts of a token class."""
PREDICTED_MAX = 1 << 30
"""Greatest predicted output that a class's name may hold."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class GroupKey:
    """Traits that the requests of a group share. Several groups may share a key (see `GroupAssignment` in the planner). `token_class`: what
    estimates go by, whoever makes them."""

    model: str
    slo_kind: SloKind
    slo_class: str
    token_class: str
    tenant_class: str = "1"


def slo_class(slo: Slo) -> str:
    """The power of two of seconds that is at or above the SLO ("32s" for 20 s; "1/4s" below one; "inf" for any time), or "p<priority>"."""
    if slo.kind is SloKind.PRIORITY:
        return f"p{slo.priority}"
    if math.isinf(slo.seconds):
        return "inf"
    exponent = math.ceil(math.log2(slo.seconds))
    return f"{2**exponent}s" if exponent >= 0 else f"1/{2**-exponent}s"


def shortest_slo_s(slo_class: str) -> float:
    """The SLO that all of a class exceed ("32s" is for more than 16 s); infinite for a class that is no time."""
    text = slo_class.removesuffix("s")
    if text == slo_class:
        return math.inf
    above, _, below = text.partition("/")
    try:
        return float(above) / float(below or 1) / 2.0
    except (ValueError, ZeroDivisionError):
        return math.inf


def token_class(prompt_tokens: int, expected_output_tokens: int = 0) -> str:
    """The prompt's class and, where the output was predicted at arrival, the predicted output's: "256" or "256/o64". It is fixed by what
    was accepted with the request, so it never changes while the request waits."""
    prompt = prompt_class(prompt_tokens)
    return f"{prompt}{OUTPUT_MARK}{prompt_class(expected_output_tokens)}" if expected_output_tokens else prompt


def prompt_class(tokens: int) -> str:
    """The power of four at or above a count of tokens: "256" for 65 to 256."""
    power = 1
    while power < tokens:
        power *= 4
    return str(power)


def prompt_class_of(token_class: str) -> str:
    """The prompt's part of a token class."""
    return token_class.partition(OUTPUT_MARK)[0]


def predicted_tokens_of(token_class: str) -> float:
    """The output that was predicted for requests of a token class: the middle between its powers of four; 0 where none was, or the class
    is none that we write."""
    most = token_class.partition(OUTPUT_MARK)[2]
    return max(1.0, 0.625 * int(most)) if most.isdecimal() and 1 <= int(most) <= PREDICTED_MAX else 0.0


def group_key(request: RequestFacts, tenant_class: str = "1") -> GroupKey:
    return GroupKey(
        model=request.model,
        slo_kind=request.slo.kind,
        slo_class=slo_class(request.slo),
        token_class=token_class(request.prompt_tokens, request.predicted_output_tokens),
        tenant_class=tenant_class,
    )
