"""Learns how much slower an instance is than the profile of its GPUs and model (the online side of QLM's hardware profiling).

The measured duration of a run is held against what the profile says of the same run: its decode steps, one for each output token, over as
many sequences as ran beside it, and the prefills that shared the engine meanwhile. The profile is the prior, with the weight that
`base_rows` gives it; an instance that drifts is learned anew from where it began to (`drift`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from qlm_core.instance import InstanceFacts
from qlm_core.profile import HardwareProfile
from qlm_estimator.activity import FinishedRun
from qlm_estimator.base_rows import BaseRows, prior_s
from qlm_estimator.drift import DriftDetector, Shift

DRIFT_MEMORY_RUNS = 100.0
"""Runs of a drifting row after which an old one weighs 1 / e."""

RATIO_MAX = 16.0
"""A run that took so many times longer or shorter than predicted tells of something else than the engine's speed."""

OUTPUT_TOKENS_MIN = 4
"""Shorter runs are mostly waiting for others' prefills."""

PREFILL_DUE_SHARE_MAX = 0.5
"""Most of a run's duration that prefills outstanding at its pull or at its end may stand for: their order is the engine's affair."""

DRIFTED_PRIOR_S = 2.4
"""Seconds of predicted run time that the pair's row weighs as much as on an instance that was seen to change: it may be off by 50% now."""

REFERENCE_STEP = (32.0, 16_000.0)
"""Sequences and context tokens of the step by which two rows of one pair are compared."""

RESTORED_RUN_S = 5.0
"""Predicted duration that each run behind a restored row is taken to have had, if the row does not tell the prior's share."""

RESTORED_RUN_MAX_S = 100.0
"""Most that it is taken to have had by the prior's share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """An instance began to run a model `change` times as slow as it did, from `since_s` on."""

    instance: str
    model: str
    since_s: float
    change: float


@dataclass(slots=True)
class _Row:
    base: HardwareProfile
    measured_s: float = 0.0
    predicted_s: float = 0.0
    weight: float = 0.0
    drift: DriftDetector = field(default_factory=DriftDetector)
    drifted: bool = False

    @property
    def slowdown(self) -> float:
        """The mean of the posterior (see `base_rows`)."""
        return (self.measured_s + self._prior_s) / (self.predicted_s + self._prior_s)

    @property
    def prior_share(self) -> float:
        """How much of `slowdown` is the prior's."""
        return self._prior_s / (self.predicted_s + self._prior_s)

    @property
    def _prior_s(self) -> float:
        return DRIFTED_PRIOR_S if self.drifted else prior_s(self.base)

    def add(self, at_s: float, measured_s: float, predicted_s: float, memory: float, time_scale: float) -> Shift | None:
        """A run; the shift that it made certain."""
        shift = self.drift.add(at_s, self.slowdown, self.weight, measured_s, predicted_s, time_scale)
        if shift is not None:
            self.drifted = True
            self.measured_s, self.predicted_s, self.weight = shift.measured_s, shift.predicted_s, float(shift.runs)
            return shift
        kept = 1.0 - 1.0 / (min(memory, DRIFT_MEMORY_RUNS) if self.drift.drifting_since_s else memory)
        self.measured_s = self.measured_s * kept + measured_s
        self.predicted_s = self.predicted_s * kept + predicted_s
        self.weight = self.weight * kept + 1.0
        return None


class SpeedLearner:
    """Rows for (instance, profile name). At most `rows_max`: the one that was not updated for the longest goes first."""

    def __init__(self, *, base: BaseRows, memory: float, rows_max: int) -> None:
        """`memory`: runs of a row after which an old one weighs 1 / e."""
        self._base = base
        self._drifts: list[Drift] = []
        self._memory = memory
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
                    self._rows[key] = self._restored(published[key], base)
        for profile in profiles:
            base = self._base.of(*profile.key)
            key = (profile.instance, profile.model)
            if profile.instance and base is not None and (key in self._rows or len(self._rows) < self._rows_max):
                self._rows[key] = self._restored(profile, base)

    def _restored(self, profile: HardwareProfile, base: HardwareProfile) -> _Row:
        """The row whose runs a published one must have had, held against another row of its pair if that is what there is now."""
        drifts = profile.drifting_since_s > 0.0
        prior = DRIFTED_PRIOR_S if drifts else prior_s(profile)
        weight = min(float(profile.samples), self._memory)
        each_s = RESTORED_RUN_S
        if profile.prior_share and weight:
            each_s = min(RESTORED_RUN_MAX_S, prior * (1.0 / profile.prior_share - 1.0) / weight)
        predicted_s = weight * each_s
        measured_s = max(0.0, profile.slowdown * (predicted_s + prior) - prior)
        step_s, was_s = (row.decode_step_s(*REFERENCE_STEP) for row in (base, replace(profile, slowdown=1.0)))
        return _Row(base, measured_s, predicted_s * step_s / was_s, weight, DriftDetector.restored(profile.drifting_since_s), drifts)

    def hardware(self, instance: InstanceFacts, profile_name: str) -> HardwareProfile | None:
        """What is believed now of a model on an instance, by the instance's own clock; None for a pair without a profile."""
        base = self._base.of(instance.gpu, instance.n_gpu, profile_name)
        if base is None:
            return None
        row = self._rows.get((instance.name, profile_name))
        known = row is not None and row.base == base
        return replace(base, slowdown=row.slowdown if known and row is not None else 1.0).scaled(instance.time_scale)

    def add(self, instance: InstanceFacts, profile_name: str, run: FinishedRun, output_tokens: int) -> bool:
        """One finished run that made `output_tokens` by itself; False if it is left out."""
        base = self._base.of(instance.gpu, instance.n_gpu, profile_name)
        if base is None or output_tokens < OUTPUT_TOKENS_MIN:
            return False
        due_max_s = PREFILL_DUE_SHARE_MAX * run.seconds
        if not run.run.certain or max(run.run.prefill_due_s, run.prefill_due_s) > due_max_s:
            return False
        known = self._rows.get((instance.name, profile_name))
        due_s = (run.run.prefill_due_s - run.prefill_due_s) * instance.time_scale / (known.slowdown if known else 1.0)
        predicted_s = _predicted_s(base, run, due_s, output_tokens)
        measured_s = run.seconds * instance.time_scale
        if not (predicted_s > 0.0 and predicted_s / RATIO_MAX < measured_s < predicted_s * RATIO_MAX):
            return False
        key = (instance.name, profile_name)
        row = self._rows.pop(key, None)
        if row is None or row.base != base:  # new, or the instance has other GPUs now, or its pair another row
            row = _Row(base)
        self._rows[key] = row  # the last in order is the newest
        shift = row.add(run.run.pulled_s + run.seconds, measured_s, predicted_s, self._memory, instance.time_scale)
        if shift is not None:
            change = shift.measured_s / (shift.predicted_s * shift.slowdown)
            self._drifts.append(Drift(instance=instance.name, model=profile_name, since_s=shift.since_s, change=change))
        while len(self._rows) > self._rows_max:
            del self._rows[next(iter(self._rows))]
        return True

    def drifts(self) -> tuple[Drift, ...]:
        """Those that were found since the last call."""
        found, self._drifts = tuple(self._drifts), []
        return found

    def profiles(self) -> tuple[HardwareProfile, ...]:
        """The rows of pairs, then the learned ones by key."""
        learned = (
            replace(
                row.base,
                instance=instance,
                slowdown=row.slowdown,
                samples=round(row.weight),
                prior_share=row.prior_share,
                drifting_since_s=row.drift.drifting_since_s,
            )
            for (instance, _), row in sorted(self._rows.items(), key=lambda each: each[0])
        )
        return (*self._base.rows(), *learned)


def _predicted_s(base: HardwareProfile, run: FinishedRun, due_s: float, output_tokens: int) -> float:
    """Seconds of the profile's own clock. The prefills of the run's time: those pulled since its pull, its own among them, and `due_s`, by
    which those outstanding at its pull were more than those at its end. A prefill makes the first token."""
    decode_s = (output_tokens - 1) * base.decode_step_s(max(1.0, run.sequences), run.context_tokens)
    prefill_s = base.prefill_work_s(run.prefill_tokens, run.prefill_squares) + due_s
    own = run.run.prompt_tokens
    return decode_s + max(prefill_s, base.prefill_work_s(own, own * own))
