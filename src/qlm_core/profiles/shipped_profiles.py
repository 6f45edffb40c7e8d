"""The hardware profiles that QLM is shipped with (data/hardware_profiles.yaml, which names the source of each figure)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from qlm_core.profiles.hardware_profile import TIMES
from qlm_core.profiles.profile import HardwareProfile, ProfileSnapshot

_OPTIONAL = ("prefill_ms_per_token_squared", "kv_swap_base_ms")
_FIGURES = ("weights_gb", "kv_bytes_per_token", "kv_capacity_tokens", *(name for name in TIMES if name not in _OPTIONAL))
_DESCRIPTION = frozenset({"gpu", "n_gpu", "model", "evidence", "sources"})


@cache
def shipped_snapshot() -> ProfileSnapshot:
    """Version 0: the shipped rows and no workload. Raises ValueError where the file is damaged."""
    text = files("qlm_core").joinpath("data", "hardware_profiles.yaml").read_text(encoding="utf-8")
    return ProfileSnapshot(version=0, made_s=0.0, hardware=parse_hardware_profiles(text))


def parse_hardware_profiles(text: str) -> tuple[HardwareProfile, ...]:
    """The rows of a profile file. Raises ValueError that names the row and the figure: unknown, missing, not a number, or a second row of
    the same key; or a source that the file does not describe."""
    document = yaml.safe_load(text)
    if not isinstance(document, Mapping) or set(document) != {"sources", "profiles"}:
        raise ValueError("hardware profiles: the file has exactly the two parts sources and profiles")
    rows: dict[tuple[str, int, str], HardwareProfile] = {}
    for number, entry in enumerate(document["profiles"], start=1):
        row = _row(number, entry, document["sources"])
        if row.key in rows:
            raise ValueError(f"hardware profiles: row {number} has the key of an earlier one, {row.key}")
        rows[row.key] = row
    return tuple(rows.values())


def _row(number: int, entry: Mapping[str, object], sources: Mapping[str, object]) -> HardwareProfile:
    expected = _DESCRIPTION | set(_FIGURES)
    if set(entry) - set(_OPTIONAL) != expected:
        raise ValueError(f"hardware profiles: row {number}: missing or unknown: {sorted(expected ^ (set(entry) - set(_OPTIONAL)))}")
    figures: dict[str, Any] = {name: entry[name] for name in (*_FIGURES, *_OPTIONAL, "n_gpu") if name in entry}
    for name, value in figures.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"hardware profiles: row {number}: {name} is a number, got {value!r}")
    named = entry["sources"]
    used = {source for part in named.values() for source in part} if isinstance(named, Mapping) else set()
    if not used or not used <= set(sources):
        raise ValueError(f"hardware profiles: row {number}: sources are names of the first part, got {named!r}")
    return HardwareProfile(gpu=str(entry["gpu"]), model=str(entry["model"]), **figures)
