"""Rules of valid SLOs: those of `Slo` in request.proto."""

from __future__ import annotations

from collections.abc import Mapping

from qlm_core.vocabulary.errors import invalid_field
from qlm_core.vocabulary.request import Slo, SloKind

SECONDS_MIN = 0.001
"""The shortest SLO and expiry: the queue's clock counts in milliseconds."""
SLO_S_MAX = 30 * 86_400.0
PRIORITY_MAX = 1_000

SLO_KINDS: Mapping[int, SloKind] = {1: SloKind.COMPLETION, 2: SloKind.FIRST_TOKEN, 3: SloKind.PRIORITY}
"""Numbers of SloKind in request.proto."""


def checked_slo(kind_number: int, seconds: float, priority: int) -> Slo:
    """The SLO that a message's fields stand for. Raises InvalidRequest."""
    kind = SLO_KINDS.get(kind_number)
    if kind is None:
        raise invalid_field("slo.kind", "COMPLETION, FIRST_TOKEN or PRIORITY")
    if kind is SloKind.PRIORITY:
        if seconds != 0.0:
            raise invalid_field("slo.seconds", "absent for PRIORITY", seconds)
        if abs(priority) > PRIORITY_MAX:
            raise invalid_field("slo.priority", f"from -{PRIORITY_MAX} to {PRIORITY_MAX}", priority)
        return Slo(kind=kind, priority=priority)
    if priority:
        raise invalid_field("slo.priority", "absent except with PRIORITY", priority)
    check_seconds("slo.seconds", seconds, SLO_S_MAX)
    return Slo(kind=kind, seconds=seconds)


def check_seconds(field: str, seconds: float, seconds_max: float) -> None:
    """Raises InvalidRequest for a duration that is not finite, shorter than a millisecond or too long."""
    if not SECONDS_MIN <= seconds <= seconds_max:  # False for NaN
        raise invalid_field(field, f"a number of seconds from {SECONDS_MIN} to {seconds_max:.0f}", seconds)
