"""What an exact answer is worth."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """OPTIMAL: proven, within the gap that was asked for. FEASIBLE: the best that was found in time."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
