"""Learns how much longer loads of models and moves of KV take on an instance than the profile of its GPUs and model says.

Loads are few, and each may be far off: the files of a model are in the page cache or not, another load has the disk, an engine starts a
process or wakes one. What is believed is the mean of the logarithms of measured over profiled times, in which old ones fade and none counts
as more than FAR from the mean before it; it begins with the pair's own figure, which weighs as much as PRIOR_OPERATIONS.

A warming tells of loads from disk: it is held against them with the time from host memory added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from qlm_estimator.events import OperationKind, ReportedOperation
from qlm_estimator.newest_rows import put_newest
from qlm_estimator.speed.base_rows import BaseRows

PRIOR_OPERATIONS: Mapping[str, float] = {ORIGIN_SHIPPED: 1.0, ORIGIN_MEASURED: 2.0, ORIGIN_FACTS: 0.5}
"""Operations that the pair's own figure weighs as much as."""
MEMORY = 8.0
"""Operations of a kind after which an old one weighs 1 / e."""
FAR = math.log(2.0)
SPREAD = 0.35
"""Of the logarithm: what operations of one kind differ by, a factor of 1.4."""
RESOLUTION_S = 0.002
"""Of a measured time: what the process that measures adds by its own turns. Operations that take no longer tell little."""
TOOK_MAX_S = 86_400.0
"""No operation takes longer."""
KV_REFERENCE_TOKENS = 1_000.0
"""Of the request by which the KV times of two rows of one pair are compared."""
_LOG_MAX = math.log(SLOWDOWN_MAX)


@dataclass(slots=True)
class _Learned:
    """One kind of operation of a model on an instance: faded sums of weights and of weighted logarithms, over the prior's as well.
    `samples`: operations seen."""

    prior: float
    weight: float
    total: float = 0.0
    samples: int = 0

    @property
    def level(self) -> float:
        return min(_LOG_MAX, max(-_LOG_MAX, self.total / self.weight))

    @property
    def slowdown(self) -> OperationSlowdown:
        if not self.samples:
            return AS_PROFILED
        return OperationSlowdown(slowdown=math.exp(self.level), samples=self.samples, prior_share=self.prior / self.weight)

    def add(self, error: float, weight: float) -> None:
        kept = math.exp(-weight / MEMORY)
        seen = min(max(error, self.level - FAR), self.level + FAR)
        self.prior, self.weight, self.total = kept * self.prior, kept * self.weight + weight, kept * self.total + weight * seen
        self.samples += 1


class OperationTimes:
    """Rows for (instance, profile name). At most `rows_max`: the one that was not updated for the longest goes first."""

    def __init__(self, *, base: BaseRows, rows_max: int) -> None:
        self._base = base
        self._rows_max = rows_max
        self._rows: dict[tuple[str, str], tuple[HardwareProfile, dict[str, _Learned]]] = {}

    def restore(self, profiles: Iterable[HardwareProfile]) -> None:
        """Takes the published or imported rows that tell of operations as the state, in place of what is there for them. The rows of pairs
        among them are known by then."""
        own = {key: replace(base, instance=key[0], **_slowdowns(learned)) for key, (base, learned) in self._rows.items()}
        for profile in [*own.values(), *profiles]:
            base = self._base.of(*profile.key)
            if profile.instance and base is not None and any(getattr(profile, name).samples for name in TIMED_OPERATIONS):
                put_newest(self._rows, (profile.instance, profile.model), (base, _restored(profile, base)), self._rows_max)

    def add(self, instance: InstanceFacts, profile_name: str, operation: ReportedOperation) -> bool:
        """One operation; False if it is left out: no finite time above 0, or nothing is profiled to hold it against."""
        base = self._base.of(instance.gpu, instance.n_gpu, profile_name)
        if base is None or not 0.0 < operation.took_s <= TOOK_MAX_S:  # False for NaN
            return False
        key = (instance.name, profile_name)
        known, learned = self._rows.get(key, (None, {}))
        if known is None or known.key != base.key:  # new, or the instance has other GPUs now
            learned = _learned(base)
        measured_s = operation.took_s * instance.time_scale
        match operation.kind:
            case OperationKind.SWAPPED_WARM:
                name, profiled_s = "swap_warm", base.swap_s(warm=True)
            case OperationKind.SWAPPED_COLD:
                name, profiled_s = "swap_cold", base.swap_s(warm=False)
            case OperationKind.WARMED:
                name, profiled_s = "swap_cold", base.swap_s(warm=False)
                measured_s += math.exp(learned["swap_warm"].level) * base.swap_s(warm=True)
            case OperationKind.KV_MOVED:
                name, profiled_s = "kv_swap", base.kv_swap_s(operation.tokens, operation.requests)
        if not (math.isfinite(profiled_s) and SPREAD * profiled_s > 0.0):
            return False
        blur = RESOLUTION_S * instance.time_scale / (SPREAD * profiled_s)
        ratio = min(SLOWDOWN_MAX, max(1.0 / SLOWDOWN_MAX, measured_s / profiled_s))
        learned[name].add(math.log(ratio), 1.0 / (1.0 + blur * blur))
        put_newest(self._rows, key, (base, learned), self._rows_max)
        return True

    def in_rows(self, profiles: Iterable[HardwareProfile]) -> Iterator[HardwareProfile]:
        """Rows with what was learned of their operations, and after them those of instances and models that have none."""
        left = dict(self._rows)
        for profile in profiles:
            key = (profile.instance, profile.model)
            known, learned = self._rows.get(key, (None, {}))
            if known is None or known.key != profile.key:
                yield profile
                continue
            left.pop(key, None)
            yield replace(profile, **_slowdowns(learned))
        for key, (base, learned) in sorted(left.items(), key=lambda each: each[0]):
            yield replace(base, instance=key[0], prior_share=1.0, **_slowdowns(learned))


def _learned(base: HardwareProfile) -> dict[str, _Learned]:
    prior = PRIOR_OPERATIONS[base.origin]
    return {name: _Learned(prior, prior) for name in TIMED_OPERATIONS}


def _slowdowns(learned: Mapping[str, _Learned]) -> dict[str, Any]:
    """Fields of a `HardwareProfile`."""
    return {name: each.slowdown for name, each in learned.items()}


def _restored(profile: HardwareProfile, base: HardwareProfile) -> dict[str, _Learned]:
    """As the operations behind the published figures must have been, held against `base`, which may be another row of the pair by now."""
    learned = _learned(base)
    own = replace(profile, swap_warm=AS_PROFILED, swap_cold=AS_PROFILED, kv_swap=AS_PROFILED)
    for name, each in learned.items():
        published: OperationSlowdown = getattr(profile, name)
        was_s, now_s = _profiled_s(own, name), _profiled_s(base, name)
        if published.samples and was_s > 0.0 and now_s > 0.0:
            each.samples = published.samples
            each.weight = min(each.prior / max(published.prior_share, 1e-6), MEMORY + each.prior)
            each.prior *= published.prior_share * each.weight / each.prior
            each.total = each.weight * (math.log(published.slowdown) + math.log(was_s) - math.log(now_s))
    return learned


def _profiled_s(row: HardwareProfile, name: str) -> float:
    return row.kv_swap_s(KV_REFERENCE_TOKENS) if name == "kv_swap" else row.swap_s(warm=name == "swap_warm")
