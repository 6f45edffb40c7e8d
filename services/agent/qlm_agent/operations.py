"""How often the machine carried out each LSO since its start, for telemetry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Operations:
    """Requests evicted by abort, offloaded, restored and given back unstarted; models warmed before their turn. Pulls and model swaps are
    counted where they are made."""

    evictions: int = 0
    kv_offloads: int = 0
    kv_restores: int = 0
    unpulls: int = 0
    warmings: int = 0
