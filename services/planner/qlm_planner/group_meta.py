"""What the planner writes into a group's record and reads back after a restart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qlm_core.group import GroupKey, group_key
from qlm_core.request import RequestFacts, SloKind

GroupOrder = tuple[int, int]
"""Age of a group: (fence of the leader that made it, its number there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTraits:
    """What never changes about a group. `slo_s`: SLO of its first request, infinite for PRIORITY."""

    key: GroupKey
    slo_s: float
    priority: int


def traits_of(request: RequestFacts) -> GroupTraits:
    """The traits of a group that this request opens, for who knows no tenants and clusters."""
    return GroupTraits(key=group_key(request), slo_s=request.slo.seconds, priority=request.slo.priority)


def band_of(traits: GroupTraits, slo_band: int) -> int:
    """Lower bands are served first: PRIORITY requests by their number, all with an SLO in one configured band."""
    return traits.priority if traits.key.slo_kind is SloKind.PRIORITY else slo_band


def to_meta(traits: GroupTraits, band: int) -> dict[str, str]:
    """`model` is what `pull` compares. `band`: for who predicts; the planner derives it again, as its settings may have changed."""
    key = traits.key
    cluster = {"cluster": key.cluster} if key.cluster else {}
    return {
        "model": key.model,
        "slo_kind": key.slo_kind.value,
        "slo_class": key.slo_class,
        "token_class": key.token_class,
        "tenant_class": key.tenant_class,
        "slo_s": repr(traits.slo_s),
        "priority": str(traits.priority),
        "band": str(band),
        **cluster,
    }


def from_meta(meta: Mapping[str, str]) -> GroupTraits:
    """Reads what `to_meta` wrote. A record that lacks something (made by another version) is a group without an objective: it is served,
    after those that have one."""
    kind = meta.get("slo_kind", "")
    known = kind in {each.value for each in SloKind}
    return GroupTraits(
        key=GroupKey(
            model=meta.get("model", ""),
            slo_kind=SloKind(kind) if known else SloKind.COMPLETION,
            slo_class=meta.get("slo_class", ""),
            token_class=meta.get("token_class", ""),
            tenant_class=meta.get("tenant_class", "1"),
            cluster=meta.get("cluster", ""),
        ),
        slo_s=_number(meta.get("slo_s", "")),
        priority=int(_number(meta.get("priority", "0"), 0.0)),
    )


def group_id_of(fence: int, number: int) -> str:
    """Never repeats across leaders: a fence belongs to one of them."""
    return f"g{fence}-{number}"


def order_of(group_id: str) -> GroupOrder:
    """The age of a group by its id; (0, 0), the oldest, for an id that no planner made."""
    fence, _, number = group_id.removeprefix("g").partition("-")
    return (int(fence), int(number)) if fence.isdecimal() and number.isdecimal() else (0, 0)


def _number(text: str, otherwise: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        return otherwise
    return otherwise if math.isnan(value) else value
