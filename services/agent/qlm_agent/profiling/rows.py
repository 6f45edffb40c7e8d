"""Makes a row of the hardware profiles from a fit, and the text of a file of such rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import yaml

from qlm_agent.profiling.fitting import Fit
from qlm_agent.profiling.measurements import Measurements
from qlm_core.profiles.hardware_profile import ORIGIN_MEASURED, TIMED_OPERATIONS, HardwareProfile
from qlm_core.vocabulary.model import ModelFacts

DIGITS = 4
"""Significant digits of a figure: more than its precision."""

_NO_FIGURES = {"gpu", "n_gpu", "model", "instance", "slowdown", "samples", "prior_share", "origin", *TIMED_OPERATIONS}
_FIGURES = tuple(field.name for field in fields(HardwareProfile) if field.name not in _NO_FIGURES)


SOURCE = {
    "from": "qlm profile",
    "licence": "ours",
    "what": "runs of known sizes through the engine itself; unmeasured figures are the prior ones",
}
"""Header of a file of measured rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledModel:
    """A measured row. `before`: the prior row of the pair, None without one."""

    row: HardwareProfile
    before: HardwareProfile | None
    fitted: Fit
    measured: Measurements

    @property
    def evidence(self) -> str:
        """The row's evidence, in a line."""
        fitted, measured = self.fitted, self.measured
        return (
            f"measured by qlm profile in {measured.engine_s:.0f} s: {len(measured.windows)} decode windows off by "
            f"{fitted.decode_error:.1%}, {len(measured.prefills)} prefills by {fitted.prefill_error:.1%}"
        )


def profiled(
    fitted: Fit, measured: Measurements, *, gpu: str, n_gpu: int, profile: str, before: HardwareProfile | None, facts: ModelFacts | None
) -> ProfiledModel:
    """The row of a pair. An unmeasured figure is the prior one, with a note. Raises ValueError if it has none."""
    known: dict[str, float] = {name: figure.value for name, figure in fitted.figures.items()}
    known["kv_capacity_tokens"] = measured.kv_capacity_tokens
    weights_gb = measured.weights_gb or (facts.weights_gb if facts is not None else 0.0)
    kv_bytes = measured.kv_bytes_per_token or (facts.kv_bytes_per_token if facts is not None else 0.0)
    known |= {name: value for name, value in (("weights_gb", weights_gb), ("kv_bytes_per_token", round(kv_bytes))) if value}
    missing = [name for name in _FIGURES if name not in known]
    if missing and before is None:
        raise ValueError(f"could not be measured, and {profile} on {n_gpu} x {gpu} has no prior: {', '.join(missing)}")
    for name in missing:
        known[name] = getattr(before, name)
        measured.notes.append(f"{name} was not measured: it is the prior figure")
    figures: dict[str, Any] = {name: _rounded(value) for name, value in known.items()}
    row = HardwareProfile(gpu=gpu, n_gpu=n_gpu, model=profile, origin=ORIGIN_MEASURED, **figures)
    return ProfiledModel(row=row, before=before, fitted=fitted, measured=measured)


def table_text(models: Sequence[ProfiledModel]) -> str:
    """A file in the format of the shipped table (qlm_core/data/hardware_profiles.yaml), which `qlm profiles import` takes."""
    parts = ("decode", "prefill", "load", "memory")
    document = {
        "sources": {"profiling_run": dict(SOURCE)},
        "profiles": [
            {
                "gpu": model.row.gpu,
                "n_gpu": model.row.n_gpu,
                "model": model.row.model,
                "evidence": model.evidence,
                "sources": {part: ["profiling_run"] for part in parts},
                **{name: _rounded(getattr(model.row, name)) for name in _FIGURES},
            }
            for model in models
        ],
    }
    return yaml.safe_dump(document, sort_keys=False, width=140)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")
