"""The waits that the planner predicts for its plan and publishes: those of newcomers by class, and those along each virtual queue.

Readers add a request's own part: its place, later arrivals, its prefill and its output.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.request import SloKind

QUEUES_MAX = 1_000
"""Most virtual queues of a publication."""
CLASSES_MAX = 1_000
"""Most classes of a publication."""
KNOTS_MAX = 64
"""Most knots of a queue's curve."""

WaitKey = tuple[str, SloKind, str, str]
"""(model, SLO kind, SLO class, token class)."""


@dataclass(frozen=True, slots=True)
class WaitPlace:
    """A place on a queue. `wait`: until the start, before calibration. `chunk_s`: what rides along with a chunk of a prefill there;
    `token_s`: of one output token."""

    wait: Normal
    chunk_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class WaitCurve:
    """`WaitPlace`s by the requests ahead, straight between the knots: columns of the same length >= 1, `ahead` never falling. Beyond the
    last knot the wait goes on as between the last two. Raises ValueError for other columns."""

    ahead: tuple[float, ...]
    wait_s: tuple[float, ...]
    wait_variance: tuple[float, ...]
    chunk_s: tuple[float, ...]
    token_s: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.ahead, self.wait_s, self.wait_variance, self.chunk_s, self.token_s)}
        if len(lengths) != 1 or not self.ahead:
            raise ValueError("the columns of a curve of waits have the same number of knots, at least one")

    def at(self, ahead: float) -> WaitPlace:
        """Costs O(log knots)."""
        knots = self.ahead
        high = min(max(bisect_left(knots, ahead), 1), len(knots) - 1)
        low = max(high - 1, 0)
        span = knots[high] - knots[low]
        share = (ahead - knots[low]) / span if span > 0.0 else 0.0
        within = min(max(share, 0.0), 1.0)
        share = max(share, 0.0)
        wait_s = max(0.0, _between(self.wait_s, low, high, share))
        return WaitPlace(
            wait=Normal(wait_s, max(0.0, _between(self.wait_variance, low, high, share))),
            chunk_s=_between(self.chunk_s, low, high, within),
            token_s=_between(self.token_s, low, high, within),
        )


def _between(column: tuple[float, ...], low: int, high: int, share: float) -> float:
    return column[low] + share * (column[high] - column[low])


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueWaits:
    """The queue of a live instance, whose `instance.models` are left out. `running` requests of the active model, `waiting` of all models,
    `alike` of the active one. `curve`: None where nobody waits or nothing can be predicted."""

    instance: InstanceFacts
    running: int
    waiting: int
    alike: int
    curve: WaitCurve | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassWaits:
    """A newcomer of a class: on the queue of `instance`, behind `requests_ahead` that wait. `slo_s`: of the class, infinite for PRIORITY.
    `curve`: by the number of newcomers since."""

    key: WaitKey
    slo_s: float
    instance: str
    requests_ahead: int
    curve: WaitCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWaits:
    """One publication. `made_s`: seconds of the queue's clock. `counted_to`: the acceptance number of the last request that it counts.
    `instances`: how many live ones serve each model."""

    made_s: float
    plan_version: int
    profile_version: int
    counted_to: int
    queues: tuple[QueueWaits, ...] = ()
    classes: tuple[ClassWaits, ...] = ()
    instances: Mapping[str, int]
