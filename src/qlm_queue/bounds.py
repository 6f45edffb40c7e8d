"""Limits of a queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of one queue; all are configurable (`qlm_process.settings.BoundsSettings` says what each is)."""

    queue_max: int = 500_000
    tenant_max: int = 250_000
    class_max: int = 400_000
    attempts_max: int = 3
    pulls_max: int = 100
    result_ttl_s: float = 3600.0
    frames_max: int = 20_000
    frames_ttl_s: float = 60.0
    control_max: int = 10_000
    events_max: int = 50_000
    memory_share: float = 0.8
