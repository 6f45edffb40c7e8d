"""A group of requests: its traits, how the queue records them, and how it stands on the board."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qlm_core.group import GroupKey, group_key
from qlm_core.instance import UNASSIGNED
from qlm_core.request import RequestFacts, SloKind

GroupOrder = tuple[int, int]
"""Age of a group: (fence of the leader that made it, its number there)."""

AGED, USUAL, BEHIND = range(3)
"""Tiers of a band, the first served first: who has waited too long, everybody else, and who has had more than its share."""
TIERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTraits:
    """What never changes about a group. `slo_s`: SLO of its first request, infinite for PRIORITY."""

    key: GroupKey
    slo_s: float
    priority: int


@dataclass(slots=True, kw_only=True)
class Group:
    """`instance`: the virtual queue that it is on or was on last. It is open, and on that queue, while `waiting` > 0. `first_deadline_s`:
    since it was opened, of those that run or ended too; `next_deadline_s`: of the first that waits and can miss it, infinite where none
    can. `tier`: its place within its band (`qlm_planner.groups.ranks`). `slo_least_s`: of its requests, down to half of that of the first
    one, which its traits tell. `answered`: of those that wait, how many have their first token, which is all that their SLO bounds, and
    came back later."""

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
        """Of those that wait; 0 where none does."""
        return self.waiting_prompt_tokens / max(1, self.waiting)

    @property
    def due_share(self) -> float:
        """Of those that wait, the share whose SLO can still be missed."""
        return 1.0 - self.answered / self.waiting if self.answered else 1.0

    @property
    def rank(self) -> int:
        """Lower ranks are served first: the band, and the tier within it."""
        return TIERS * self.band + self.tier

    @property
    def spread_s(self) -> float:
        """Seconds from the deadline of the first that waits to the last; 0 where there is none."""
        return max(0.0, self.last_deadline_s - self.next_deadline_s) if self.next_deadline_s < math.inf else 0.0

    def told_next(self, deadline_s: float) -> None:
        """The queue says when the first that waits is due. Those that are answered came first."""
        self.next_deadline_s = deadline_s
        self.answered = min(self.answered, self.waiting)
        if self.answered:
            left = self.waiting - self.answered
            self.next_deadline_s = deadline_s + self.spread_s * self.answered / (self.waiting - 1) if left else math.inf

    @property
    def urgency(self) -> tuple[int, float, GroupOrder]:
        """Sorts as earliest deadline first inside ranks; the older group first where deadlines are equal."""
        return (self.rank, self.first_deadline_s, self.order)


def traits_of(request: RequestFacts, tenant_class: str = "1") -> GroupTraits:
    """The traits of a group that this request opens."""
    return GroupTraits(key=group_key(request, tenant_class), slo_s=request.slo.seconds, priority=request.slo.priority)


def group_of_one(group_id: str, traits: GroupTraits, slo_band: int, deadline_s: float, prompt_tokens: int) -> Group:
    """A group of one request that waits, on no queue."""
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
    """Lower bands are served first: PRIORITY requests by their number, all with an SLO in one configured band."""
    return traits.priority if traits.key.slo_kind is SloKind.PRIORITY else slo_band


def to_meta(traits: GroupTraits, band: int) -> dict[str, str]:
    """`model` is what `pull` compares. `band`: for who predicts; the planner derives it again, as its settings may have changed."""
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
