"""Tenants: the weight of their lateness, and the share of the served work above which others precede them.

Both are in the group key: a *weight class*, one of nine powers of two, and the name of a limited or paused tenant. So many tenants give few
classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WEIGHT_EXPONENT_MAX = 4
"""Weights are rounded to the nearest power of two from 1/16 to 16: nine classes."""
LIMITED_MAX = 64
"""Most limited tenants at a time without settings of their own; further ones are not limited, as 64 cannot all exceed 1/64."""
BETWEEN = "/"
"""Separates a weight class and a tenant's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Settings of one tenant, "" for all without settings of their own. `share_max`: of the served work, 1 for no limit. Raises ValueError
    for a weight that is not finite and positive, and a share outside (0, 1]."""

    name: str = ""
    weight: float = 1.0
    share_max: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0.0):
            raise ValueError(f"tenant {self.name!r}: weight must be finite and > 0, got {self.weight}")
        if not 0.0 < self.share_max <= 1.0:
            raise ValueError(f"tenant {self.name!r}: share_max must be > 0 and at most 1, got {self.share_max}")

    @property
    def limited(self) -> bool:
        return self.share_max < 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """All tenants' settings. Raises ValueError for an empty or repeated name."""

    named: tuple[Tenant, ...] = ()
    others: Tenant = field(default_factory=Tenant)
    _by_name: dict[str, Tenant] = field(init=False, repr=False, compare=False, hash=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._by_name.update({tenant.name: tenant for tenant in self.named})
        if len(self._by_name) != len(self.named) or "" in self._by_name:
            raise ValueError("tenants: each needs a name of its own")

    def of(self, name: str) -> Tenant:
        return self._by_name.get(name, self.others)

    def knows(self, name: str) -> bool:
        return name in self._by_name

    def share_max(self, tenant_class: str) -> float:
        """The limit of a class of tenants, 1 for none."""
        name = limited_tenant(tenant_class)
        return self.of(name).share_max if name else 1.0


def weight_class(weight: float) -> str:
    """The nearest power of two: "2", "1_4" for a quarter."""
    exponent = max(-WEIGHT_EXPONENT_MAX, min(WEIGHT_EXPONENT_MAX, round(math.log2(weight))))
    return str(2**exponent) if exponent >= 0 else f"1_{2**-exponent}"


WEIGHTS = {weight_class(2.0**exponent): 2.0**exponent for exponent in range(-WEIGHT_EXPONENT_MAX, WEIGHT_EXPONENT_MAX + 1)}


def weight_of(tenant_class: str) -> float:
    """The weight of a late request of a class; 1 for an unknown class."""
    return WEIGHTS.get(tenant_class.partition(BETWEEN)[0], 1.0)


def limited_tenant(tenant_class: str) -> str:
    """The tenant's name in the class of a limited or paused tenant, "" in others."""
    return tenant_class.partition(BETWEEN)[2]


@dataclass(slots=True, kw_only=True)
class TenantClasses:
    """Maps tenants to classes. `seen_s`: last request of limited tenants without settings of their own, `LIMITED_MAX` at most; a place
    frees `forget_s` after it."""

    tenants: Tenants
    forget_s: float
    seen_s: dict[str, float] = field(default_factory=dict)

    def of(self, name: str, now_s: float, *, paused: bool = False) -> str:
        """The class of a tenant. A `paused` one gets a class of its own."""
        tenant = self.tenants.of(name)
        weight = weight_class(tenant.weight)
        if name and paused:
            return f"{weight}{BETWEEN}{name}"
        if not name or not tenant.limited or not (self.tenants.knows(name) or self._has_place(name, now_s)):
            return weight
        return f"{weight}{BETWEEN}{name}"

    def _has_place(self, name: str, now_s: float) -> bool:
        self.seen_s.pop(name, None)
        if len(self.seen_s) >= LIMITED_MAX:
            self.seen_s = {each: seen_s for each, seen_s in self.seen_s.items() if now_s - seen_s < self.forget_s}
            if len(self.seen_s) >= LIMITED_MAX:
                return False
        self.seen_s[name] = now_s
        return True
