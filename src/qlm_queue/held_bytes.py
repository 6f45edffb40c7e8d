"""Bytes that a queue holds, against its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qlm_queue.bounds import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Bytes that live requests and kept results hold, against a bound. `bound`: "queue", "tenant" or "class"; `name`: of the tenant or
    class; `limit`: 0 for no bound."""

    bound: str
    name: str
    held: int
    limit: int


def held_bytes(bounds: Bounds, total: int, by_tenant: Mapping[str, int], by_class: Mapping[str, int]) -> list[HeldBytes]:
    """The queue, and the tenant and the class that hold most; none of them where nothing is held."""
    held = [HeldBytes(bound="queue", name="", held=total, limit=bounds.queue_bytes_max)]
    for bound, by_name, limit in (("tenant", by_tenant, bounds.tenant_bytes_max), ("class", by_class, bounds.class_bytes_max)):
        if any(by_name.values()):
            name = max(sorted(by_name), key=lambda each: by_name[each])
            held.append(HeldBytes(bound=bound, name=name, held=by_name[name], limit=limit))
    return held
