"""Profiles: what the estimator knows of hardware (GPU and model) and of workload (request class).

A snapshot is one version of all. Hardware comes from the shipped table or from facts of GPU and model and, once an instance has been
measured, from that instance.
Workload comes from finished requests; a class with few of them leans on its model, a model with few on a stated prior.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from qlm_core.profiles.calibration import NOT_CALIBRATED, CalibrationTable
from qlm_core.profiles.hardware_prior import hardware_prior
from qlm_core.profiles.hardware_profile import HardwareKey, HardwareProfile
from qlm_core.profiles.workload_profile import (
    PRIOR_SAMPLES,
    WORKLOAD_PRIOR,
    WorkloadKey,
    WorkloadProfile,
    blend_all,
    blended_curve,
    wider_row,
)
from qlm_core.statistics.length_curve import LengthCurve
from qlm_core.statistics.length_model import NO_LENGTH_MODEL, LengthModel
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelFacts, ModelSpec

__all__ = ["PRIOR_SAMPLES", "WORKLOAD_PRIOR", "HardwareKey", "HardwareProfile", "ProfileSnapshot", "WorkloadKey", "WorkloadProfile"]

CURVES_MAX = 8_192
"""Curves that a snapshot keeps once requested."""

ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")

Longest = tuple[float, ...]
"""Tokens of the longest of so many outputs, for the counts of `length_curve.LONGEST_OF`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSnapshot:
    """One version of all profiles. `made_s`: seconds of the queue's clock; `last_event_id`: "<ms>-<n>" of the last entry of the event
    stream that it was learned from, "" for none. Lookups cost O(1)."""

    version: int
    made_s: float
    hardware: tuple[HardwareProfile, ...]
    workload: tuple[WorkloadProfile, ...] = ()
    length_model: LengthModel = NO_LENGTH_MODEL
    calibration: CalibrationTable = NOT_CALIBRATED
    last_event_id: str = ""
    _shipped: Mapping[HardwareKey, HardwareProfile] = field(init=False, repr=False, compare=False)
    _learned: Mapping[tuple[str, str], HardwareProfile] = field(init=False, repr=False, compare=False)
    _priors: dict[tuple[HardwareKey, ModelFacts | None], HardwareProfile | None] = field(init=False, repr=False, compare=False)
    _own: Mapping[WorkloadKey, WorkloadProfile] = field(init=False, repr=False, compare=False)
    _blended: Mapping[WorkloadKey, WorkloadProfile] = field(init=False, repr=False, compare=False)
    _curves: dict[WorkloadKey, LengthCurve] = field(init=False, repr=False, compare=False)
    _longest: dict[WorkloadKey, Longest] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.version < 0 or not math.isfinite(self.made_s):
            raise ValueError(f"a snapshot has a version >= 0 and a finite time, got {self.version} and {self.made_s}")
        if self.last_event_id and not ENTRY_ID.fullmatch(self.last_event_id):
            raise ValueError(f"the id of an entry is <ms>-<n>, got {self.last_event_id!r}")
        object.__setattr__(self, "_shipped", {row.key: row for row in self.hardware if not row.instance})
        object.__setattr__(self, "_learned", {(row.instance, row.model): row for row in self.hardware if row.instance})
        object.__setattr__(self, "_priors", {})  # what follows from the fields, kept once requested
        object.__setattr__(self, "_own", {row.key: row for row in self.workload})
        object.__setattr__(self, "_blended", blend_all(self.workload))
        object.__setattr__(self, "_curves", {})  # as `_priors`
        object.__setattr__(self, "_longest", {})

    def hardware_for(self, instance: InstanceFacts, spec: ModelSpec) -> HardwareProfile | None:
        """The row of this instance if it was learned on the GPUs it has now, else the row of its GPUs, else what follows from the facts of
        GPU and model; with durations as its clock shows them (divided by `time_scale`). None where not even those are known, or the model
        does not fit."""
        row = self._learned.get((instance.name, spec.profile))
        if row is None or (row.gpu, row.n_gpu) != (instance.gpu, instance.n_gpu):
            row = self.hardware_of_pair(instance.gpu, instance.n_gpu, spec)
        return None if row is None else row.scaled(instance.time_scale)

    def hardware_of_pair(self, gpu: str, n_gpu: int, spec: ModelSpec) -> HardwareProfile | None:
        """The row of a pair of GPUs and model before any instance of it was measured: its own, or what follows from facts."""
        key = (gpu, n_gpu, spec.profile)
        row = self._shipped.get(key)
        if row is None:
            if (key, spec.facts) not in self._priors:
                self._priors[key, spec.facts] = hardware_prior(gpu, n_gpu, spec.profile, spec.facts)
            row = self._priors[key, spec.facts]
        return row

    def workload_for(self, model: str, slo_class: str, token_class: str) -> WorkloadProfile:
        """The class's own moments leaning on those of its model, and these on `WORKLOAD_PRIOR`, by `PRIOR_SAMPLES`. `samples` are those of
        the narrowest class that has any."""
        key = (model, slo_class, token_class)
        found = self._blended.get(key)
        return wider_row(self._blended, key) if found is None else found

    def output_curve_for(self, model: str, slo_class: str, token_class: str) -> LengthCurve:
        """The distribution of the class's outputs, leaning on wider ones in the same way: quantiles, and what a request has left given
        what it produced."""
        wanted = (model, slo_class, token_class)
        curve = self._curves.get(wanted)
        if curve is None:
            key = self.workload_for(*wanted).key
            curve = self._curves.get(key) or blended_curve(self._own, self._blended, key)
            if len(self._curves) >= CURVES_MAX:
                self._curves.clear()
            self._curves[key] = self._curves[wanted] = curve
        return curve

    def longest_output_for(self, model: str, slo_class: str, token_class: str) -> Longest:
        """The longest of so many of the class's outputs, expected: for the counts of `length_curve.LONGEST_OF`, in tokens."""
        wanted = (model, slo_class, token_class)
        found = self._longest.get(wanted)
        if found is None:
            if len(self._longest) >= CURVES_MAX:
                self._longest.clear()
            found = self._longest[wanted] = tuple(self.output_curve_for(*wanted).longest().tolist())
        return found
