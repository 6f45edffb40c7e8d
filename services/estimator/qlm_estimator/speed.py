"""Learns how much slower an instance is than the shipped profile of its GPUs and model (the online side of QLM's hardware profiling).

The measured duration of a run is held against what the profile says of the same run: its decode steps, one for each output token, over as
many sequences as ran beside it, and the prefills that shared the engine meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qlm_core.instance import InstanceFacts
from qlm_core.profile import HardwareProfile
from qlm_estimator.activity import FinishedRun

PRIOR_S = 60.0
"""Seconds of predicted run time that the shipped profile weighs as much as."""

RATIO_MAX = 16.0
"""A run that took so many times longer or shorter than predicted tells of something else than the engine's speed."""

OUTPUT_TOKENS_MIN = 4
"""Shorter runs are mostly waiting for others' prefills."""

PREFILL_DUE_SHARE_MAX = 0.5
"""Most of a run's duration that prefills outstanding at its pull or at its end may stand for: their order is the engine's affair."""

RESTORED_RUN_S = 5.0
"""Predicted duration that each run behind a restored row is taken to have had."""


@dataclass(slots=True)
class _Row:
    shipped: HardwareProfile
    measured_s: float = 0.0
    predicted_s: float = 0.0
    weight: float = 0.0

    @property
    def slowdown(self) -> float:
        return (self.measured_s + PRIOR_S) / (self.predicted_s + PRIOR_S)


class SpeedLearner:
    """Rows for (instance, profile name). At most `rows_max`: the one that was not updated for the longest goes first."""

    def __init__(self, *, shipped: tuple[HardwareProfile, ...], memory: float, rows_max: int) -> None:
        """`memory`: runs of a row after which an old one weighs 1 / e."""
        self._shipped: Mapping[tuple[str, int, str], HardwareProfile] = {row.key: row for row in shipped}
        self._memory = memory
        self._rows_max = rows_max
        self._rows: dict[tuple[str, str], _Row] = {}

    def restore(self, profiles: tuple[HardwareProfile, ...]) -> None:
        """Takes published rows as the state; rows of pairs that are no longer shipped are dropped."""
        for profile in profiles:
            shipped = self._shipped.get(profile.key)
            if profile.instance and shipped is not None and len(self._rows) < self._rows_max:
                weight = min(float(profile.samples), self._memory)
                predicted_s = weight * RESTORED_RUN_S
                measured_s = max(0.0, profile.slowdown * (predicted_s + PRIOR_S) - PRIOR_S)
                self._rows[(profile.instance, profile.model)] = _Row(shipped, measured_s, predicted_s, weight)

    def hardware(self, instance: InstanceFacts, profile_name: str) -> HardwareProfile | None:
        """What is believed now of a model on an instance, by the instance's own clock; None for a pair without a profile."""
        shipped = self._shipped.get((instance.gpu, instance.n_gpu, profile_name))
        if shipped is None:
            return None
        row = self._rows.get((instance.name, profile_name))
        known = row is not None and row.shipped.key == shipped.key
        return replace(shipped, slowdown=row.slowdown if known and row is not None else 1.0).scaled(instance.time_scale)

    def add(self, instance: InstanceFacts, profile_name: str, run: FinishedRun, output_tokens: int, output_left_tokens: float) -> bool:
        """One finished run that made `output_tokens` by itself; False if it is left out. `output_left_tokens`: what a running
        request of the model has produced in the mean (as much as it has left)."""
        shipped = self._shipped.get((instance.gpu, instance.n_gpu, profile_name))
        if shipped is None or output_tokens < OUTPUT_TOKENS_MIN:
            return False
        due_max_s = PREFILL_DUE_SHARE_MAX * run.seconds
        if not run.run.certain or max(run.run.prefill_due_s, run.prefill_due_s) > due_max_s:
            return False
        known = self._rows.get((instance.name, profile_name))
        due_s = (run.run.prefill_due_s - run.prefill_due_s) * instance.time_scale / (known.slowdown if known else 1.0)
        predicted_s = _predicted_s(shipped, run, due_s, output_tokens, output_left_tokens)
        measured_s = run.seconds * instance.time_scale
        if not (predicted_s > 0.0 and predicted_s / RATIO_MAX < measured_s < predicted_s * RATIO_MAX):
            return False
        key = (instance.name, profile_name)
        row = self._rows.pop(key, None)
        if row is None or row.shipped.key != shipped.key:  # new, or the instance has other GPUs now
            row = _Row(shipped)
        self._rows[key] = row  # the last in order is the newest
        kept = 1.0 - 1.0 / self._memory
        row.measured_s = row.measured_s * kept + measured_s
        row.predicted_s = row.predicted_s * kept + predicted_s
        row.weight = row.weight * kept + 1.0
        while len(self._rows) > self._rows_max:
            del self._rows[next(iter(self._rows))]
        return True

    def profiles(self) -> tuple[HardwareProfile, ...]:
        """The shipped rows, then the learned ones by key."""
        learned = (
            replace(row.shipped, instance=instance, slowdown=row.slowdown, samples=round(row.weight))
            for (instance, _), row in sorted(self._rows.items())
        )
        return (*self._shipped.values(), *learned)


def _predicted_s(shipped: HardwareProfile, run: FinishedRun, due_s: float, output_tokens: int, left_tokens: float) -> float:
    """Seconds of the profile's own clock. The prefills of the run's time: those pulled since its pull, its own among them, and `due_s`, by
    which those outstanding at its pull were more than those at its end. A prefill makes the first token."""
    sequences = max(1.0, run.sequences)
    context_tokens = run.prompt_tokens_held + sequences * left_tokens
    decode_s = (output_tokens - 1) * shipped.decode_step_s(sequences, context_tokens)
    prefill_s = shipped.prefill_work_s(run.prefill_tokens) + due_s
    return decode_s + max(prefill_s, shipped.prefill_work_s(run.run.prompt_tokens))
