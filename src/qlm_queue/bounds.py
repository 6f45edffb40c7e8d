"""Limits of a queue, and the bytes that it holds against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qlm_core.vocabulary.errors import QueueFull

RECORD_BYTES = 768
"""Counted for the record of each live request and of each result, beside its body and output: about what a server keeps for it in hashes,
indexes and streams (`lua/prelude.lua` has the same number)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of one queue; all are configurable (`qlm_process.settings.BoundsSettings` says what each is)."""

    queue_max: int = 500_000
    tenant_max: int = 250_000
    class_max: int = 400_000
    queue_bytes_max: int = 8_000_000_000
    tenant_bytes_max: int = 4_000_000_000
    class_bytes_max: int = 6_400_000_000
    attempts_max: int = 3
    pulls_max: int = 100
    result_ttl_s: float = 3600.0
    frames_max: int = 20_000
    frames_ttl_s: float = 60.0
    control_max: int = 10_000
    events_max: int = 50_000
    memory_share: float = 0.8
    disk_share: float = 0.5


def requests_full(bound: str, limit: int) -> QueueFull:
    """The refusal where a "queue", "tenant" or "class" has too many live requests."""
    return QueueFull(f"the queue is full: {limit} live requests of this {bound}", details={"bound": bound, "limit": str(limit)})


def with_name(error: QueueFull, tenant: str, slo_class: str) -> QueueFull:
    """The refusal of a request of this tenant and class, with the name of the one that the bound is of."""
    bound = error.details["bound"].removesuffix("_bytes")
    name = {"tenant": tenant, "class": slo_class}.get(bound)
    if name is None:
        return error
    return QueueFull(error.message.replace(f"this {bound}", f"{bound} {name!r}"), details={**error.details, "name": name})


def bytes_full(bound: str, limit: int, held: int, frees_after_s: float | None) -> QueueFull:
    """The refusal where a "queue", "tenant" or "class" holds too many bytes. `frees_after_s`: until the window of the first result is over,
    where results hold most places."""
    details = {"bound": f"{bound}_bytes", "limit": str(limit), "held": str(held)}
    if frees_after_s is not None:
        details["retry_after_s"] = f"{frees_after_s:.3f}"
    text = f"the queue is full: requests and results of this {bound} hold {held} bytes, and {limit} is the bound"
    return QueueFull(text, details=details)


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
