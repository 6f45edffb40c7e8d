"""Learns how much slower an instance is than the profile of its GPUs and model (the online side of QLM's hardware profiling).

A run that made n tokens took n - 1 steps from its first token to its end, whatever it waited for before. These seconds are held against
what the profile says of the same steps: over as many sequences as decoded beside it, with the prefills that rode along. Prefills go in the
order of pulls, so these are of the prompts pulled behind it (`activity`). The factor is the ratio of the two
sums, which fade with the engine time that passes (`MEMORY_S`); they begin with the profile as so many seconds of both (`base_rows`).
Loads and moves of KV have factors of their own (`operations`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from qlm_core.profiles.profile import HardwareProfile
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_estimator.events import ReportedOperation
from qlm_estimator.newest_rows import put_newest
from qlm_estimator.speed.activity import FinishedRun
from qlm_estimator.speed.base_rows import BaseRows, prior_s
from qlm_estimator.speed.operations import OperationFactor, learn_operation, operation_factors

MEMORY_S = 30.0
"""Engine time after which an old run weighs 1 / e. Two minutes after a change of the speed, 2% of it is left."""

RATIO_MAX = 16.0
"""A run that took so many times longer or shorter than predicted has another cause than the engine's speed."""

PRIOR_SHARE_MIN = 1e-3
"""Least `prior_share` that a published row is read with."""


@dataclass(slots=True)
class _Row:
    """A model on an instance, held against the row `base` of its pair. Faded sums over the runs: what they took and what `base` says of
    them. `prior_s`: what is left of the beginning; `runs`: all."""

    base: HardwareProfile
    measured_s: float
    predicted_s: float
    prior_s: float
    operations: dict[str, OperationFactor]
    runs: int = 0

    @property
    def slowdown(self) -> float:
        return self.measured_s / self.predicted_s

    def published(self, instance: str) -> HardwareProfile:
        """The row of the instance; `prior_share`: how much of its `slowdown` is the profile's."""
        operations: dict[str, Any] = {name: each.slowdown for name, each in self.operations.items()}
        share = self.prior_s / self.predicted_s
        return replace(self.base, instance=instance, slowdown=self.slowdown, samples=self.runs, prior_share=share, **operations)

    def restore(self, profile: HardwareProfile) -> None:
        """Takes the figures of runs and of operations of a published row; those that it lacks stay as they are."""
        if profile.samples:
            self.predicted_s = prior_s(self.base) / max(profile.prior_share, PRIOR_SHARE_MIN)
            self.measured_s, self.prior_s = profile.slowdown * self.predicted_s, profile.prior_share * self.predicted_s
            self.runs = profile.samples
        for name, each in self.operations.items():
            each.restore(getattr(profile, name))

    def add(self, measured_s: float, predicted_s: float, engine_s: float) -> None:
        """A run; `engine_s`: its share of the engine's time."""
        kept = math.exp(-engine_s / MEMORY_S)
        self.measured_s = self.measured_s * kept + measured_s
        self.predicted_s = self.predicted_s * kept + predicted_s
        self.prior_s *= kept
        self.runs += 1


class SpeedLearner:
    """Rows for (instance, profile name). At most `rows_max`: the one that was not updated for the longest goes first. A row begins afresh
    where its instance has other GPUs, or its pair another row: that was measured, and what a factor on the old one said is learned again
    within MEMORY_S."""

    def __init__(self, *, base: BaseRows, rows_max: int) -> None:
        self._base = base
        self._rows_max = rows_max
        self._rows: dict[tuple[str, str], _Row] = {}

    def restore(self, profiles: tuple[HardwareProfile, ...]) -> None:
        """Takes published or imported rows as the state, in place of what is there for them; learned rows that are held against another
        row of their pair than the one that counts now are dropped."""
        self._base.take(profiles)
        self._rows = {key: row for key, row in self._rows.items() if self._base.of(*row.base.key) == row.base}
        for profile in profiles:
            row = self._row(profile.instance, *profile.key)
            if row is not None and profile.instance and row.base == profile.as_pair():
                row.restore(profile)
                put_newest(self._rows, (profile.instance, profile.model), row, self._rows_max)

    def hardware(self, instance: InstanceFacts, profile_name: str) -> HardwareProfile | None:
        """Returns the present estimate of a model's steps on an instance, by its own clock; None for a pair without a profile."""
        row = self._row(instance.name, instance.gpu, instance.n_gpu, profile_name)
        return None if row is None else replace(row.base, slowdown=row.slowdown).scaled(instance.time_scale)

    def slowdown(self, instance: str, profile_name: str) -> float:
        """How slow an instance is believed to be beside the row of its pair; 1 where nothing was learned."""
        row = self._rows.get((instance, profile_name))
        return 1.0 if row is None else row.slowdown

    def add(self, instance: InstanceFacts, profile_name: str, run: FinishedRun, output_tokens: int) -> bool:
        """One finished run that made `output_tokens` by itself; False if it is left out."""
        row = self._row(instance.name, instance.gpu, instance.n_gpu, profile_name)
        if row is None or output_tokens < 2 or not run.run.certain or not run.seconds > 0.0:
            return False
        decode_s = (output_tokens - 1) * row.base.decode_step_s(max(1.0, run.sequences), run.context_tokens)
        predicted_s = decode_s + row.base.prefill_work_s(run.prefill_tokens, run.prefill_squares)
        measured_s = run.seconds * instance.time_scale
        if not predicted_s / RATIO_MAX < measured_s < predicted_s * RATIO_MAX:
            return False
        row.add(measured_s, predicted_s, measured_s / max(1.0, run.sequences))
        put_newest(self._rows, (instance.name, profile_name), row, self._rows_max)
        return True

    def add_operation(self, instance: InstanceFacts, profile_name: str, operation: ReportedOperation) -> bool:
        """One load or move of KV; False if it is left out."""
        row = self._row(instance.name, instance.gpu, instance.n_gpu, profile_name)
        if row is None or not learn_operation(row.operations, row.base, operation, instance.time_scale):
            return False
        put_newest(self._rows, (instance.name, profile_name), row, self._rows_max)
        return True

    def profiles(self) -> tuple[HardwareProfile, ...]:
        """The rows of pairs, then the learned ones by key."""
        return (*self._base.rows(), *(self._rows[key].published(key[0]) for key in sorted(self._rows)))

    def _row(self, instance: str, gpu: str, n_gpu: int, profile_name: str) -> _Row | None:
        """The row of an instance, a new one where there is none that is held against its pair's; None for a pair without a profile."""
        base = self._base.of(gpu, n_gpu, profile_name)
        if base is None:
            return None
        row = self._rows.get((instance, profile_name))
        if row is not None and row.base == base:
            return row
        return _Row(base, prior_s(base), prior_s(base), prior_s(base), operation_factors(base))
