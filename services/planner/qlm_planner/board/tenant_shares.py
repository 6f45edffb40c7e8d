"""Which share of the served work each tenant with a limit has had lately.

Served work is GPU time: an instance's, split among what it runs. It is looked at with every overview, so a missed event falsifies nothing.
A new leader begins with an empty window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from qlm_planner.board.slot import Slot
from qlm_planner.board.tenants import Tenants, limited_tenant

PARTS = 12
"""The window moves on by so many parts of it."""

LOOK_MAX_S = 10.0
"""What runs is taken to have run since the look before, at most for so long."""

BACK = 0.95
"""A tenant counts as above its share until it is below this part of it: it shall not go back and forth at every look."""


@dataclass(slots=True, kw_only=True)
class _Part:
    began_s: float
    all_s: float = 0.0
    by_class: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TenantShares:
    """`above`: classes of tenants that had more than their share when it was looked at last."""

    tenants: Tenants
    window_s: float
    above: frozenset[str] = frozenset()
    looked_s: float | None = None
    _parts: deque[_Part] = field(default_factory=deque)

    def look(self, slots: Iterable[Slot], now_s: float) -> None:
        """Takes in what has run since the last look."""
        passed_s = 0.0 if self.looked_s is None else min(LOOK_MAX_S, max(0.0, now_s - self.looked_s))
        self.looked_s = now_s
        part = self._part(now_s)
        for slot in slots:
            running = sum(kept.count for kept in slot.runners.values())
            if not slot.alive or running == 0:
                continue
            part.all_s += passed_s
            for kept in slot.runners.values():
                name = kept.traits.key.tenant_class
                if limited_tenant(name):
                    part.by_class[name] = part.by_class.get(name, 0.0) + passed_s * kept.count / running
        self.above = frozenset(name for name, share in self.in_use().items() if share > self._allowed(name))

    def in_use(self) -> dict[str, float]:
        """Class of tenants with a limit -> share of the served work of the window, where it had any."""
        all_s = sum(part.all_s for part in self._parts)
        totals: dict[str, float] = {}
        for part in self._parts:
            for name, seconds in part.by_class.items():
                totals[name] = totals.get(name, 0.0) + seconds
        return {name: seconds / all_s for name, seconds in sorted(totals.items())} if all_s > 0.0 else {}

    def _allowed(self, name: str) -> float:
        return self.tenants.share_max(name) * (BACK if name in self.above else 1.0)

    def _part(self, now_s: float) -> _Part:
        """The newest part of the window; those that it has left behind are dropped."""
        while self._parts and now_s - self._parts[0].began_s >= self.window_s:
            self._parts.popleft()
        if not self._parts or now_s - self._parts[-1].began_s >= self.window_s / PARTS:
            self._parts.append(_Part(began_s=now_s))
        return self._parts[-1]
