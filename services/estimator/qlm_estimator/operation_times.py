"""Learns how much longer loads of models and moves of KV take on an instance than the profile of its GPUs and model says.

Loads are few, and each may be far off: the files of a model are in the page cache or not, another load has the disk, an engine starts a
process or wakes one. So what is believed is a robust mean of the logarithms of measured over profiled times: Huber's, over the last
operations and the pair's own figure, which counts as a few of them (`PRIOR_OPERATIONS`). Within `SPREAD` of the mean it is the posterior
of a normal prior, as for runs (see `base_rows`); what is farther off pulls no harder than at that distance.

A warming tells of loads from disk: it is held against them with the time from host memory added.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qlm_core.hardware_profile import (
    AS_PROFILED,
    ORIGIN_FACTS,
    ORIGIN_MEASURED,
    ORIGIN_SHIPPED,
    TIMED_OPERATIONS,
    HardwareProfile,
    OperationSlowdown,
)
from qlm_core.importable_profiles import SLOWDOWN_MAX
from qlm_core.instance import InstanceFacts
from qlm_estimator.base_rows import BaseRows
from qlm_estimator.events import OperationKind, OperationTold

PRIOR_OPERATIONS: Mapping[str, float] = {ORIGIN_SHIPPED: 1.0, ORIGIN_MEASURED: 2.0, ORIGIN_FACTS: 0.5}
"""Operations that the pair's own figure weighs as much as."""

DRIFTED_PRIOR = 0.25
"""The same once the operation was seen to change."""

WINDOW = 32
"""Operations that are remembered of a kind."""

SPREAD = 0.35
"""Of the logarithm: what operations of one kind differ by without being outliers, a factor of 1.4."""

RESOLUTION_S = 0.002
"""Of a measured time: what the process that measures adds by its own turns. Operations that take no longer tell little."""

TOOK_MAX_S = 86_400.0
"""No operation takes longer."""

WARMED_WEIGHT = 0.5
"""Of a warming as a load from disk: it went on beside a batch."""

ROUNDS = 16
"""Of the robust mean; it moves by less than a percent after five."""

DRIFT_ERROR = math.log(1.5)
DRIFT_OPERATIONS = 4
DRIFT_LASTS_S = 10.0
"""So many operations on end, over so long, that are off by more than that factor in one direction are a drift."""

DRIFT_WEIGHT_MIN = 0.25
"""Operations that count less are no sign of it."""

WARM_UP_OPERATIONS = 8
"""Operations behind what was learned before it can be drifted from."""

SETTLED_OPERATIONS = 16
"""Operations without another drift after which it no longer counts as one."""

KV_REFERENCE_TOKENS = 1_000.0
"""Of the request by which the KV times of two rows of one pair are compared."""

_PROFILED_S: Mapping[str, Callable[[HardwareProfile], float]] = {
    "swap_warm": lambda row: row.swap_s(warm=True),
    "swap_cold": lambda row: row.swap_s(warm=False),
    "kv_swap": lambda row: row.kv_swap_s(KV_REFERENCE_TOKENS),
}
_LOG_MAX = math.log(SLOWDOWN_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDrift:
    """An operation began to take `change` times as long as it did, from `since_s` on."""

    instance: str
    model: str
    operation: str
    since_s: float
    change: float


@dataclass(frozen=True, slots=True)
class _Seen:
    """One operation: the logarithm of measured over profiled, and how much it counts, up to 1."""

    error: float
    weight: float
    at_s: float


@dataclass(slots=True)
class _Learned:
    """One kind of operation of a model on an instance. `off`: the last ones, which were off `off_level` by DRIFT_ERROR in one direction."""

    prior: float
    seen: deque[_Seen] = field(default_factory=lambda: deque(maxlen=WINDOW))
    level: float = 0.0
    prior_share: float = 1.0
    drifting_since_s: float = 0.0
    off: list[_Seen] = field(default_factory=list)
    off_level: float = 0.0
    settled_in: int = 0

    @property
    def slowdown(self) -> OperationSlowdown:
        if not self.seen:
            return AS_PROFILED
        return OperationSlowdown(
            slowdown=math.exp(self.level),
            samples=len(self.seen),
            prior_share=self.prior_share,
            drifting_since_s=self.drifting_since_s,
        )

    def add(self, seen: _Seen) -> float:
        """The factor of the drift that it made certain, 0 for none."""
        if self.settled_in:
            self.settled_in -= 1
            if not self.settled_in:
                self.drifting_since_s = 0.0
        change = self._drift(seen)
        if change:
            self.drifting_since_s = self.off[0].at_s
            self.settled_in = SETTLED_OPERATIONS
            self.prior = min(self.prior, DRIFTED_PRIOR)
            self.seen = deque(self.off, maxlen=WINDOW)
            self.off = []
        else:
            self.seen.append(seen)
        self._believe()
        return change

    def _drift(self, seen: _Seen) -> float:
        if seen.weight < DRIFT_WEIGHT_MIN or len(self.seen) < WARM_UP_OPERATIONS:
            return 0.0
        level = self.off_level if self.off else self.level
        error = seen.error - level
        if self.off and error * (self.off[-1].error - level) <= 0.0:
            self.off, error = [], seen.error - self.level
        if abs(error) <= DRIFT_ERROR:
            self.off = []
            return 0.0
        if not self.off:
            self.off_level = self.level
        self.off = [*self.off, seen][-WINDOW:]
        if len(self.off) < DRIFT_OPERATIONS or seen.at_s - self.off[0].at_s < DRIFT_LASTS_S:
            return 0.0
        return math.exp(robust_mean(((each.error, each.weight) for each in self.off), 0.0)[0] - self.off_level)

    def restore(self, published: OperationSlowdown, shift: float) -> None:
        """As the operations behind a published figure must have been; `shift`: to the logarithms, for a pair's row that is another now."""
        samples = min(WINDOW, published.samples)
        if not samples:
            return
        drifting = published.drifting_since_s > 0.0
        self.prior = min(self.prior, DRIFTED_PRIOR) if drifting else self.prior
        level = math.log(published.slowdown)
        # As sure as they were, but no less than it takes for all to be within SPREAD of the mean, as they then are at once.
        by_share = self.prior * (1.0 / max(1e-6, published.prior_share) - 1.0) / samples
        weight = min(1.0, max(by_share, abs(level) * self.prior / (samples * SPREAD)))
        if weight <= 0.0:
            return
        error = level * (1.0 + self.prior / (samples * weight)) + shift
        self.seen = deque([_Seen(error, weight, 0.0)] * samples, maxlen=WINDOW)
        self.drifting_since_s = published.drifting_since_s
        self.settled_in = SETTLED_OPERATIONS if drifting else 0
        self._believe()

    def shifted(self, prior: float, shift: float) -> _Learned:
        """The same held against another row of the pair."""
        seen = (_Seen(each.error + shift, each.weight, each.at_s) for each in self.seen)
        found = replace(self, prior=min(prior, self.prior) if self.drifting_since_s else prior, seen=deque(seen, maxlen=WINDOW), off=[])
        found._believe()
        return found

    def _believe(self) -> None:
        self.level, self.prior_share = robust_mean(((each.error, each.weight) for each in self.seen), self.prior)
        self.level = min(_LOG_MAX, max(-_LOG_MAX, self.level))


@dataclass(slots=True)
class _Row:
    base: HardwareProfile
    operations: dict[str, _Learned]

    @classmethod
    def of(cls, base: HardwareProfile) -> _Row:
        return cls(base, {name: _Learned(PRIOR_OPERATIONS[base.origin]) for name in TIMED_OPERATIONS})

    def against(self, base: HardwareProfile) -> _Row:
        """What was learned, held against another row of the pair."""
        row = _Row.of(base)
        for name, learned in self.operations.items():
            was_s, now_s = _PROFILED_S[name](self.base), _PROFILED_S[name](base)
            if was_s > 0.0 and now_s > 0.0:
                row.operations[name] = learned.shifted(PRIOR_OPERATIONS[base.origin], math.log(was_s) - math.log(now_s))
        return row

    def slowdowns(self) -> dict[str, Any]:
        """Fields of a `HardwareProfile`."""
        return {name: learned.slowdown for name, learned in self.operations.items()}


class OperationTimes:
    """Rows for (instance, profile name). At most `rows_max`: the one that was not updated for the longest goes first."""

    def __init__(self, *, base: BaseRows, rows_max: int) -> None:
        self._base = base
        self._rows_max = rows_max
        self._rows: dict[tuple[str, str], _Row] = {}
        self._drifts: list[OperationDrift] = []

    def restore(self, profiles: Iterable[HardwareProfile]) -> None:
        """Takes the published or imported rows that tell of operations as the state, in place of what is there for them. The rows of pairs
        among them are known by then."""
        for key, row in list(self._rows.items()):
            base = self._base.of(*row.base.key)
            if base is not None and base != row.base:
                self._rows[key] = row.against(base)
        for profile in profiles:
            base = self._base.of(*profile.key)
            if not profile.instance or base is None or all(getattr(profile, name) == AS_PROFILED for name in TIMED_OPERATIONS):
                continue
            own = replace(profile, swap_warm=AS_PROFILED, swap_cold=AS_PROFILED, kv_swap=AS_PROFILED)
            row = _Row.of(base)
            for name, learned in row.operations.items():
                was_s, now_s = _PROFILED_S[name](own), _PROFILED_S[name](base)
                if was_s > 0.0 and now_s > 0.0:
                    learned.restore(getattr(profile, name), math.log(was_s) - math.log(now_s))
            self._put((profile.instance, profile.model), row)

    def add(self, instance: InstanceFacts, profile_name: str, told: OperationTold) -> bool:
        """One operation; False if it is left out: no finite time above 0, or nothing is profiled to hold it against."""
        base = self._base.of(instance.gpu, instance.n_gpu, profile_name)
        if base is None or not 0.0 < told.took_s <= TOOK_MAX_S:  # False for NaN
            return False
        key = (instance.name, profile_name)
        row = self._rows.get(key)
        if row is None or row.base.key != base.key:  # new, or the instance has other GPUs now
            row = _Row.of(base)
        measured_s = told.took_s * instance.time_scale
        weight = 1.0
        match told.kind:
            case OperationKind.SWAPPED_WARM:
                name, profiled_s = "swap_warm", base.swap_s(warm=True)
            case OperationKind.SWAPPED_COLD:
                name, profiled_s = "swap_cold", base.swap_s(warm=False)
            case OperationKind.WARMED:
                name, profiled_s, weight = "swap_cold", base.swap_s(warm=False), WARMED_WEIGHT
                measured_s += math.exp(row.operations["swap_warm"].level) * base.swap_s(warm=True)
            case OperationKind.KV_MOVED:
                name, profiled_s = "kv_swap", base.kv_moved_s(told.requests, told.tokens)
        if not (math.isfinite(profiled_s) and min(profiled_s * SPREAD, measured_s) > 0.0):
            return False
        blur = RESOLUTION_S * instance.time_scale / (profiled_s * SPREAD)
        error = math.log(min(SLOWDOWN_MAX, max(1.0 / SLOWDOWN_MAX, measured_s / profiled_s)))
        at_s = told.entry_id[0] / 1000.0
        change = row.operations[name].add(_Seen(error, weight / (1.0 + blur * blur), at_s))
        self._put(key, row)
        if change:
            since_s = row.operations[name].drifting_since_s
            self._drifts.append(OperationDrift(instance=key[0], model=key[1], operation=name, since_s=since_s, change=change))
        return True

    def drifts(self) -> tuple[OperationDrift, ...]:
        """Those that were found since the last call."""
        found, self._drifts = tuple(self._drifts), []
        return found

    def in_rows(self, profiles: Iterable[HardwareProfile]) -> Iterator[HardwareProfile]:
        """Rows with what was learned of their operations, and after them those of instances and models that have none."""
        told: set[tuple[str, str]] = set()
        for profile in profiles:
            key = (profile.instance, profile.model)
            row = self._rows.get(key) if profile.instance else None
            if row is None or row.base.key != profile.key:
                yield profile
                continue
            told.add(key)
            yield replace(profile, **row.slowdowns())
        for key, row in sorted(self._rows.items(), key=lambda each: each[0]):
            if key not in told:
                yield replace(row.base, instance=key[0], prior_share=1.0, **row.slowdowns())

    def _put(self, key: tuple[str, str], row: _Row) -> None:
        """The last in order is the newest."""
        self._rows.pop(key, None)
        self._rows[key] = row
        while len(self._rows) > self._rows_max:
            del self._rows[next(iter(self._rows))]


def robust_mean(seen: Iterable[tuple[float, float]], prior: float) -> tuple[float, float]:
    """Huber's mean of (value, weight) pairs and a prior of that weight at 0, and the prior's share of it. 0 and 1 without any pair."""
    values = list(seen)
    if not values:
        return 0.0, 1.0
    mean = sorted(value for value, _ in values)[len(values) // 2]
    share = 0.0
    for _ in range(ROUNDS):
        weights = [weight * min(1.0, SPREAD / max(SPREAD, abs(value - mean))) for value, weight in values]
        total = prior + sum(weights)
        mean = sum(weight * value for weight, (value, _) in zip(weights, values, strict=True)) / total
        share = prior / total
    return mean, share
