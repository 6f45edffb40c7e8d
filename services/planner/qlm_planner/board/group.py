"""A group of requests: its traits, its record in the queue, and its state on the board."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qlm_core.vocabulary.group import GroupKey, group_key
from qlm_core.vocabulary.instance import UNASSIGNED
from qlm_core.vocabulary.request import RequestFacts, SloKind

GroupOrder = tuple[int, int]
"""Age of a group: (fence of its leader, its number in that term)."""
AGED, USUAL, BEHIND = range(3)
"""Tiers of a band, the first served first: groups that waited too long, usual groups, groups of tenants above their share."""
TIERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTraits:
    """Constants of a group. `slo_s`: SLO of its first request, infinite for PRIORITY."""

    key: GroupKey
    slo_s: float
    priority: int


@dataclass(slots=True, kw_only=True)
class Group:
    """`instance`: its virtual queue, or its last one. The group is open, and on that queue, while `waiting` > 0. `first_deadline_s`: the
    least of all its requests, running and ended ones too; `next_deadline_s`: of the first waiting request that can still miss it, infinite
    for none. `tier`: its place within its band (`qlm_planner.groups.ranks`). `slo_least_s`: least SLO of its requests, half of
    `traits.slo_s` at the least. `answered`: waiting requests whose SLO bounds the first token and that have it."""

    group_id: str
    order: GroupOrder
    traits: GroupTraits
    band: int
    instance: str
    first_deadline_s: float
    next_deadline_s: float
    last_deadline_s: float
    waiting: int = 0
    live: int = 0
    waiting_prompt_tokens: int = 0
    answered: int = 0
    slo_least_s: float = math.inf
    tier: int = USUAL

    def __post_init__(self) -> None:
        self.slo_least_s = min(self.slo_least_s, self.traits.slo_s)

    @property
    def open(self) -> bool:
        return self.waiting > 0

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt tokens of waiting requests; 0 without any."""
        return self.waiting_prompt_tokens / max(1, self.waiting)

    @property
    def due_share(self) -> float:
        """Share of the waiting requests that can still miss their SLO."""
        return 1.0 - self.answered / self.waiting if self.answered else 1.0

    @property
    def rank(self) -> int:
        """Order of service, lower first: the band, then the tier."""
        return TIERS * self.band + self.tier

    @property
    def spread_s(self) -> float:
        """Seconds from the first waiting deadline to the last; 0 without any."""
        return max(0.0, self.last_deadline_s - self.next_deadline_s) if self.next_deadline_s < math.inf else 0.0

    def set_next_deadline(self, deadline_s: float) -> None:
        """Takes the deadline of the first waiting request from the queue. Answered requests stand in front."""
        self.next_deadline_s = deadline_s
        self.answered = min(self.answered, self.waiting)
        if self.answered:
            left = self.waiting - self.answered
            self.next_deadline_s = deadline_s + self.spread_s * self.answered / (self.waiting - 1) if left else math.inf

    @property
    def urgency(self) -> tuple[int, float, GroupOrder]:
        """Sort key: rank, earliest deadline, age."""
        return (self.rank, self.first_deadline_s, self.order)


def traits_of(request: RequestFacts, tenant_class: str = "1") -> GroupTraits:
    """The traits of a group that a request opens."""
    return GroupTraits(key=group_key(request, tenant_class), slo_s=request.slo.seconds, priority=request.slo.priority)


def group_of_one(group_id: str, traits: GroupTraits, slo_band: int, deadline_s: float, prompt_tokens: int) -> Group:
    """A group of one waiting request, on no queue."""
    return Group(
        group_id=group_id,
        order=order_of(group_id),
        traits=traits,
        band=band_of(traits, slo_band),
        instance=UNASSIGNED,
        first_deadline_s=deadline_s,
        next_deadline_s=deadline_s,
        last_deadline_s=deadline_s,
        waiting=1,
        live=1,
        waiting_prompt_tokens=prompt_tokens,
    )


def band_of(traits: GroupTraits, slo_band: int) -> int:
    """The priority band, lower first: a PRIORITY request's number, `slo_band` for all with an SLO."""
    return traits.priority if traits.key.slo_kind is SloKind.PRIORITY else slo_band


def to_meta(traits: GroupTraits, band: int) -> dict[str, str]:
    """The record of a group: `pull` compares `model`, predictions read `band`; the planner derives the band anew from its settings."""
    key = traits.key
    return {
        "model": key.model,
        "slo_kind": key.slo_kind.value,
        "slo_class": key.slo_class,
        "token_class": key.token_class,
        "tenant_class": key.tenant_class,
        "slo_s": repr(traits.slo_s),
        "priority": str(traits.priority),
        "band": str(band),
    }


def from_meta(meta: Mapping[str, str]) -> GroupTraits:
    """Reads `to_meta`'s record. A damaged record gives a group without an SLO, served after groups with one."""
    kind = meta.get("slo_kind", "")
    known = kind in {each.value for each in SloKind}
    return GroupTraits(
        key=GroupKey(
            model=meta.get("model", ""),
            slo_kind=SloKind(kind) if known else SloKind.COMPLETION,
            slo_class=meta.get("slo_class", ""),
            token_class=meta.get("token_class", ""),
            tenant_class=meta.get("tenant_class", "1"),
        ),
        slo_s=_number(meta.get("slo_s", "")),
        priority=int(_number(meta.get("priority", "0"), 0.0)),
    )


def group_id_of(fence: int, number: int) -> str:
    """A group id, unique across leaders by their fence."""
    return f"g{fence}-{number}"


def order_of(group_id: str) -> GroupOrder:
    """The age of a group by its id; (0, 0), the oldest, for a foreign id."""
    fence, _, number = group_id.removeprefix("g").partition("-")
    return (int(fence), int(number)) if fence.isdecimal() and number.isdecimal() else (0, 0)


def _number(text: str, otherwise: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        return otherwise
    return otherwise if math.isnan(value) else value
