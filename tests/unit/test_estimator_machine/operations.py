"""Loads reported to a machine, and the times learned from them."""

from __future__ import annotations

from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_estimator.events import OperationKind

from .driver import SHIPPED, Driver

A100 = next(row for row in SHIPPED.hardware if (row.gpu, row.model) == ("A100-80GB", "Mistral-7B"))
WARM_S, COLD_S = A100.swap_s(warm=True), A100.swap_s(warm=False)
SWAPPED_WARM, SWAPPED_COLD, WARMED, KV_MOVED = OperationKind


def loads(driver: Driver, count: int, slowdown: float, *, from_s: float = 0.0, kind: OperationKind = SWAPPED_WARM) -> float:
    """So many loads a minute apart; the time after the last."""
    usual_s = {SWAPPED_WARM: WARM_S, SWAPPED_COLD: COLD_S, WARMED: COLD_S - WARM_S}[kind]
    for number in range(count):
        driver.operation(kind, from_s + 60.0 * number, slowdown * usual_s)
    return from_s + 60.0 * count


def learned(driver: Driver) -> HardwareProfile:
    (row,) = driver.learned()
    return row
