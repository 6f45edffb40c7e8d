"""Each limited tenant's share of the served work.

Served work is an instance's GPU time, divided among its running requests. Each overview updates it, so no missed event distorts it. A new
leader starts with an empty window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from qlm_planner.board.slot import Slot
from qlm_planner.board.tenants import Tenants, limited_tenant

PARTS = 12
"""Parts of the window; it moves by one part at a time."""
INTERVAL_MAX_S = 10.0
"""Longest interval for which running requests count as having run."""
HYSTERESIS = 0.95
"""A tenant above its share stays so until it uses less than this part of it."""


@dataclass(slots=True, kw_only=True)
class _Part:
    began_s: float
    all_s: float = 0.0
    by_class: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TenantShares:
    """`above`: classes of tenants above their share at the last update."""

    tenants: Tenants
    window_s: float
    above: frozenset[str] = frozenset()
    updated_s: float | None = None
    _parts: deque[_Part] = field(default_factory=deque)

    def update(self, slots: Iterable[Slot], now_s: float) -> None:
        """Adds the work served since the last update."""
        passed_s = 0.0 if self.updated_s is None else min(INTERVAL_MAX_S, max(0.0, now_s - self.updated_s))
        self.updated_s = now_s
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
        """Class of a limited tenant -> its share of the window's served work, if any."""
        all_s = sum(part.all_s for part in self._parts)
        totals: dict[str, float] = {}
        for part in self._parts:
            for name, seconds in part.by_class.items():
                totals[name] = totals.get(name, 0.0) + seconds
        return {name: seconds / all_s for name, seconds in sorted(totals.items())} if all_s > 0.0 else {}

    def _allowed(self, name: str) -> float:
        return self.tenants.share_max(name) * (HYSTERESIS if name in self.above else 1.0)

    def _part(self, now_s: float) -> _Part:
        """The newest part of the window; drops parts that left it."""
        while self._parts and now_s - self._parts[0].began_s >= self.window_s:
            self._parts.popleft()
        if not self._parts or now_s - self._parts[-1].began_s >= self.window_s / PARTS:
            self._parts.append(_Part(began_s=now_s))
        return self._parts[-1]
