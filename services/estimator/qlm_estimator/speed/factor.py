"""Learns how much slower an instance is than the profile of its GPUs and model (the online side of QLM's hardware profiling).

A run that made n tokens took n - 1 steps from its first token to its end, whatever it waited for before. These seconds are held against
what the profile says of the same steps: over as many sequences as decoded beside it, with the prefills that rode along. Prefills go in the
order of pulls, so these are of the prompts pulled behind it (`activity`). The factor is the ratio of the two
sums, which fade with the engine time that passes (`MEMORY_S`); they begin with the profile as so many seconds of both (`base_rows`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qlm_core.instance import InstanceFacts
from qlm_core.profile import HardwareProfile
from qlm_estimator.newest_rows import put_newest
from qlm_estimator.speed.activity import FinishedRun
from qlm_estimator.speed.base_rows import BaseRows, prior_s

MEMORY_S = 30.0
"""Engine time after which an old run weighs 1 / e. Two minutes after a change of the speed, 2% of it is left."""

RATIO_MAX = 16.0
"""A run that took so many times longer or shorter than predicted has another cause than the engine's speed."""

REFERENCE_STEP = (32.0, 16_000.0)
"""Sequences and context tokens of the step by which two rows of one pair are compared."""


PRIOR_SHARE_MIN = 1e-3
"""Of a published row: one that tells less is as sure as with this share."""


@dataclass(slots=True)
class _Row:
    """Faded sums over the runs: what they took and what `base` says of them. `prior_s`: what is left of the beginning; `runs`: all."""

    base: HardwareProfile
    measured_s: float
    predicted_s: float
    prior_s: float
    runs: int = 0

    @classmethod
    def of(cls, base: HardwareProfile) -> _Row:
        return cls(base, prior_s(base), prior_s(base), prior_s(base))

    @property
    def slowdown(self) -> float:
        return self.measured_s / self.predicted_s

    @property
    def prior_share(self) -> float:
        """How much of `slowdown` is the profile's."""
        return self.prior_s / self.predicted_s

    def add(self, measured_s: float, predicted_s: float, engine_s: float) -> None:
        """A run; `engine_s`: its share of the engine's time."""
        kept = math.exp(-engine_s / MEMORY_S)
        self.measured_s = self.measured_s * kept + measured_s
        self.predicted_s = self.predicted_s * kept + predicted_s
        self.prior_s *= kept
        self.runs += 1


class SpeedLearner:
    """Rows for (instance, profile name). At most `rows_max`: the one that was not updated for the longest goes first."""

    def __init__(self, *, base: BaseRows, rows_max: int) -> None:
        self._base = base
        self._rows_max = rows_max
        self._rows: dict[tuple[str, str], _Row] = {}

    def restore(self, profiles: tuple[HardwareProfile, ...]) -> None:
        """Takes published or imported rows as the state, in place of what is there for them; learned rows of pairs of which nothing is
        known any more are dropped."""
        if self._base.take(profiles):
            published = {(row.instance, row.model): row for row in self.profiles() if row.instance}
            for key, row in self._rows.items():
                base = self._base.of(*row.base.key)
                if base is not None and base != row.base:
                    self._rows[key] = _restored(published[key], base)
        for profile in profiles:
            base = self._base.of(*profile.key)
            key = (profile.instance, profile.model)
            if profile.instance and base is not None and (key in self._rows or len(self._rows) < self._rows_max):
                self._rows[key] = _restored(profile, base)

    def hardware(self, instance: InstanceFacts, profile_name: str) -> HardwareProfile | None:
        """What is believed now of a model on an instance, by the instance's own clock; None for a pair without a profile."""
        base = self._base.of(instance.gpu, instance.n_gpu, profile_name)
        if base is None:
            return None
        row = self._rows.get((instance.name, profile_name))
        known = row is not None and row.base == base
        return replace(base, slowdown=row.slowdown if known and row is not None else 1.0).scaled(instance.time_scale)

    def slowdown(self, instance: str, profile_name: str) -> float:
        """How slow an instance is believed to be beside the row of its pair; 1 where nothing was learned."""
        row = self._rows.get((instance, profile_name))
        return 1.0 if row is None else row.slowdown

    def add(self, instance: InstanceFacts, profile_name: str, run: FinishedRun, output_tokens: int) -> bool:
        """One finished run that made `output_tokens` by itself; False if it is left out."""
        base = self._base.of(instance.gpu, instance.n_gpu, profile_name)
        if base is None or output_tokens < 2 or not run.run.certain or not run.seconds > 0.0:
            return False
        predicted_s = _predicted_s(base, run, output_tokens - 1)
        measured_s = run.seconds * instance.time_scale
        if not predicted_s / RATIO_MAX < measured_s < predicted_s * RATIO_MAX:
            return False
        key = (instance.name, profile_name)
        row = self._rows.get(key)
        if row is None or row.base != base:  # new, or the instance has other GPUs now, or its pair another row
            row = _Row.of(base)
        row.add(measured_s, predicted_s, measured_s / max(1.0, run.sequences))
        put_newest(self._rows, key, row, self._rows_max)
        return True

    def profiles(self) -> tuple[HardwareProfile, ...]:
        """The rows of pairs, then the learned ones by key."""
        learned = (
            replace(row.base, instance=instance, slowdown=row.slowdown, samples=row.runs, prior_share=row.prior_share)
            for (instance, _), row in sorted(self._rows.items(), key=lambda each: each[0])
        )
        return (*self._base.rows(), *learned)


def _restored(profile: HardwareProfile, base: HardwareProfile) -> _Row:
    """The sums that a published row must have had, held against another row of its pair if that is what there is now."""
    predicted_s = prior_s(profile) / max(profile.prior_share, PRIOR_SHARE_MIN)
    step_s, was_s = (row.decode_step_s(*REFERENCE_STEP) for row in (base, replace(profile, slowdown=1.0)))
    measured_s = profile.slowdown * was_s / step_s * predicted_s
    return _Row(base, measured_s, predicted_s, profile.prior_share * predicted_s, profile.samples)


def _predicted_s(base: HardwareProfile, run: FinishedRun, steps: int) -> float:
    """Seconds of the profile's own clock."""
    decode_s = steps * base.decode_step_s(max(1.0, run.sequences), run.context_tokens)
    return decode_s + base.prefill_work_s(run.prefill_tokens, run.prefill_squares)
