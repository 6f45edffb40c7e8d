"""Overload: the choices when no order of requests meets their SLOs (QLM A.3): planner and gateways read the same setting,
`planner.overload`."""

from __future__ import annotations

from enum import StrEnum

WOULD_BE_LATE = "WOULD_BE_LATE"
"""Reason of the error for a request that is refused."""


class Overload(StrEnum):
    """The fallback."""

    BEST_EFFORT = "best_effort"
    """The cost decides who is late."""
    EDF = "edf"
    """Plain earliest deadline first while misses are expected."""
    SHED = "shed"
    """Requests that would be late anyway are failed, those of the lowest value first."""
    REFUSE = "refuse"
    """Gateways refuse what would be late, before it is accepted."""
