"""A planning problem as arrays, its orders and their costs: the whole input and output of the solver.

The cost model is `qlm_planner.cost.order_cost`: within a run (consecutive groups of one model) prefix sums of work; between runs the drain
and the swap, warmed during the run; the running requests in front.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from qlm_core.vocabulary.errors import QlmError

Integers = NDArray[np.int32]
Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

QUEUES_MAX = 10_000
GROUPS_MAX = 1_000_000


class ProblemError(QlmError):
    """An invalid problem, or invalid orders; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the objective, as in `qlm_planner.policy`."""

    late: float = 1000.0
    tardiness: float = 1.0
    work: float = 10.0
    completion: float = 0.3

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ProblemError(f"weights.{each.name}: must be finite and >= 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """G groups, Q queues, M models, K kinds of instances (equal figures). Times: seconds from now. In valid orders bands never fall along a
    queue. Raises ProblemError.

    Groups [G]: `model` (0..M-1), `band` (lower first), `count` (waiting requests), `deadline_s` (of the first request; infinite for none),
    `spread_s` (last deadline - first deadline), `slo_s` (infinite for none), `weight` (of a late request and of a request-second).
    Kinds [K, G]: `work_s`, `work_variance` (engine time of all its requests in a run of its model; infinite where the kind cannot serve
    it), `own_s`, `own_variance` (from a request's start to the event that its SLO bounds), `drain_s` (from its last start to its last end).
    Kinds [K, M]: `cold_s`, `warm_s` (to activate the model, from disk and from host memory).
    Queues [Q]: `kind`; `active` (model, -1 for none); `lead_s`, `lead_variance` (until a new request of the active model starts);
    `drain_lead_s`, `drain_lead_variance` (until all running requests have ended); `head` (the group served now, -1 for none);
    `clear_cost` (of evicting the running batch for another model; infinite if impossible), `leave_cost` (of serving another model before
    the active one), in the unit of the objective. [Q, M]: `warm` (models in host memory)."""

    model: Integers
    band: Integers
    count: Floats
    deadline_s: Floats
    spread_s: Floats
    slo_s: Floats
    weight: Floats
    work_s: Floats
    work_variance: Floats
    own_s: Floats
    own_variance: Floats
    drain_s: Floats
    cold_s: Floats
    warm_s: Floats
    kind: Integers
    active: Integers
    lead_s: Floats
    lead_variance: Floats
    drain_lead_s: Floats
    drain_lead_variance: Floats
    warm: Booleans
    head: Integers
    clear_cost: Floats
    leave_cost: Floats
    weights: Weights = field(default_factory=Weights)

    @property
    def groups(self) -> int:
        return len(self.model)

    @property
    def queues(self) -> int:
        return len(self.kind)

    @property
    def models(self) -> int:
        return int(self.cold_s.shape[1])

    def __post_init__(self) -> None:
        if self.cold_s.ndim != 2:
            raise ProblemError(f"cold_s: must be [kinds, models], got {self.cold_s.ndim} dimensions")
        kinds, models = self.cold_s.shape
        sizes = {"g": self.model.size, "q": self.kind.size, "m": models, "k": kinds}
        if not 1 <= sizes["q"] <= QUEUES_MAX:
            raise ProblemError(f"kind: there must be 1 to {QUEUES_MAX:,} queues, got {sizes['q']:,}")
        if sizes["g"] > GROUPS_MAX:
            raise ProblemError(f"model: there must be at most {GROUPS_MAX:,} groups, got {sizes['g']:,}")
        for name, (shape, low, infinite) in FIELDS.items():
            _check(name, getattr(self, name), tuple(sizes[each] for each in shape), low, infinite)
        for name, most in (("model", models), ("kind", kinds), ("active", models), ("head", sizes["g"])):
            values = getattr(self, name)
            if values.size and int(values.max()) >= most:
                raise ProblemError(f"{name}: must be below {most}, got {int(values.max())}")
        heads = self.head[self.head >= 0]
        if np.unique(heads).size != heads.size:
            raise ProblemError("head: a group is the head of one queue at the most")


FIELDS: dict[str, tuple[str, float, bool]] = {
    "model": ("g", 0.0, False),
    "band": ("g", -math.inf, False),
    "count": ("g", 0.0, False),
    "deadline_s": ("g", -math.inf, True),
    "spread_s": ("g", 0.0, False),
    "slo_s": ("g", 0.0, True),
    "weight": ("g", 0.0, False),
    "work_s": ("kg", 0.0, True),
    "work_variance": ("kg", 0.0, True),
    "own_s": ("kg", 0.0, True),
    "own_variance": ("kg", 0.0, True),
    "drain_s": ("kg", 0.0, True),
    "cold_s": ("km", 0.0, True),
    "warm_s": ("km", 0.0, True),
    "kind": ("q", 0.0, False),
    "active": ("q", -1.0, False),
    "lead_s": ("q", 0.0, False),
    "lead_variance": ("q", 0.0, False),
    "drain_lead_s": ("q", 0.0, False),
    "drain_lead_variance": ("q", 0.0, False),
    "warm": ("qm", 0.0, False),
    "head": ("q", -1.0, False),
    "clear_cost": ("q", 0.0, True),
    "leave_cost": ("q", 0.0, False),
}
"""Field -> letters of its shape, least value, may be infinite. A kind serves a group only where all its figures are finite."""


def _check(name: str, values: NDArray[np.float64], shape: tuple[int, ...], low: float, infinite: bool) -> None:
    if values.shape != shape:
        raise ProblemError(f"{name}: must have the shape {shape}, got {values.shape}")
    if not values.size or values.dtype == np.bool_:
        return
    least, most = float(values.min()), float(values.max())  # NaN where there is one
    if not infinite and not -math.inf < least <= most < math.inf:
        raise ProblemError(f"{name}: must be finite")
    if not least > -math.inf:
        raise ProblemError(f"{name}: must be a number or infinite")
    if least < low:
        raise ProblemError(f"{name}: must be >= {low:g}, got {least:g}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Orders:
    """An order for each queue: `first` [Q + 1], `groups` [placed]; queue q has groups[first[q]:first[q + 1]]. Groups that no queue can
    serve are left out."""

    first: NDArray[np.int64]
    groups: Integers

    @classmethod
    def of(cls, queues: list[list[int]]) -> Orders:
        first = np.zeros(len(queues) + 1, dtype=np.int64)
        np.cumsum([len(queue) for queue in queues], out=first[1:])
        return cls(first=first, groups=np.array([group for queue in queues for group in queue], dtype=np.int32))

    def lists(self) -> list[list[int]]:
        return [self.groups[begin:end].tolist() for begin, end in zip(self.first[:-1], self.first[1:], strict=True)]

    def checked(self, problem: Problem) -> Orders:
        """These orders. Raises ProblemError if they do not fit the problem. Bands are not checked."""
        if self.first.shape != (problem.queues + 1,) or self.first[0] != 0 or self.first[-1] != self.groups.size:
            raise ProblemError(f"first: must rise from 0 to {self.groups.size} over {problem.queues} queues")
        if (np.diff(self.first) < 0).any():
            raise ProblemError("first: must never fall")
        if self.groups.size:
            if self.groups.min() < 0 or self.groups.max() >= problem.groups:
                raise ProblemError(f"groups: must be 0 to {problem.groups - 1}")
            if np.bincount(self.groups).max() > 1:
                raise ProblemError("groups: each at most once")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of all queues. `late`, `tardiness_s`, `completion_s`: expected, weighted. `swap_s`: without the first load of an empty engine.
    `redo_cost`: of evictions; `missed_cost`: of absent models. `total`: the objective."""

    late: float = 0.0
    tardiness_s: float = 0.0
    swap_s: float = 0.0
    swaps: int = 0
    redo_cost: float = 0.0
    missed_cost: float = 0.0
    completion_s: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """`rule` made the orders; for people."""

    orders: Orders
    cost: Costs
    rule: str
