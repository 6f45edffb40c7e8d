"""Profiles as a YAML file: what `qlm profiles export` writes and `qlm profiles import` reads.

    qlm_profiles: 1
    hardware: [{gpu: ..., n_gpu: ..., model: ..., ...}, ...]
    workload: [...]

One row of each kind for each row of a snapshot, with the fields of `qlm_core.profiles.profile` by their names; a field at its default is
left out. A file in the format of the shipped table (sources and profiles, which `qlm profile` writes) is read too; its rows are measured
ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from qlm_core.profiles.calibration import CalibrationProfile, CalibrationTable
from qlm_core.profiles.hardware_profile import ORIGIN_MEASURED, HardwareProfile
from qlm_core.profiles.importable_profiles import importable
from qlm_core.profiles.profile import ProfileSnapshot, WorkloadProfile
from qlm_core.profiles.shipped_profiles import parse_hardware_profiles
from qlm_core.statistics.length_model import NO_LENGTH_MODEL, LengthModel
from qlm_process.yaml_text import parse_yaml

FORMAT = 1
"""Version of the format."""

TEXT_BYTES_MAX = 32 << 20
"""Longest file that is read."""

_HEAD = ("qlm_profiles", "version", "made_s")

_STRICT = ConfigDict(extra="forbid", strict=True)
_PARTS: Mapping[str, TypeAdapter[Any]] = {
    "hardware": TypeAdapter(tuple[HardwareProfile, ...], config=_STRICT),
    "workload": TypeAdapter(tuple[WorkloadProfile, ...], config=_STRICT),
    "calibration": TypeAdapter(tuple[CalibrationProfile, ...], config=_STRICT),
    "length_model": TypeAdapter(tuple[LengthModel, ...], config=_STRICT),
}
"""Part of the file -> what its list holds."""


def dump_profiles(snapshot: ProfileSnapshot) -> str:
    """The file of what was learned, measured or imported. Raises ValueError where there is nothing of that."""
    rows = importable(snapshot)
    parts = {
        "hardware": rows.hardware,
        "workload": rows.workload,
        "calibration": rows.calibration.rows,
        "length_model": () if rows.length_model == NO_LENGTH_MODEL else (rows.length_model,),
    }
    document: dict[str, object] = {"qlm_profiles": FORMAT, "version": rows.version, "made_s": rows.made_s}
    document |= {name: _PARTS[name].dump_python(part, mode="json", exclude_defaults=True) for name, part in parts.items() if part}
    # Lists of numbers on one line, one field of a row on each.
    return yaml.dump(document, Dumper=yaml.SafeDumper, sort_keys=False, default_flow_style=None, width=200)


def parse_profiles(text: str) -> ProfileSnapshot:
    """The importable rows of a file, as a snapshot of version 0. Raises ValueError that names the row and the field: not YAML or not of
    this format, unknown or missing fields, wrong types, figures that no profile may have, or that contradict each other."""
    if len(text) > TEXT_BYTES_MAX:
        raise ValueError(f"longer than {TEXT_BYTES_MAX:,} bytes")
    document = parse_yaml(text)
    if not isinstance(document, Mapping):
        raise ValueError("not a file of profiles: it has no parts by name")
    if "sources" in document:
        rows = parse_hardware_profiles(text)
        return importable(ProfileSnapshot(version=0, made_s=0.0, hardware=tuple(replace(row, origin=ORIGIN_MEASURED) for row in rows)))
    unknown = [str(name) for name in document if name not in _PARTS and name not in _HEAD]
    if unknown or document.get("qlm_profiles") != FORMAT:
        what = f"unknown parts {', '.join(unknown)}" if unknown else f"qlm_profiles is {document.get('qlm_profiles')!r}, not {FORMAT}"
        raise ValueError(f"not a file of profiles that this version reads: {what}")
    parts = {name: _part(name, document[name]) for name in _PARTS if name in document}
    for number, row in enumerate(parts.get("hardware", ()), start=1):
        if not row.instance and row.origin != ORIGIN_MEASURED:
            raise ValueError(f"hardware row {number}: a row without instance has the origin {ORIGIN_MEASURED!r}, got {row.origin!r}")
    models = parts.get("length_model", ())
    if len(models) > 1:
        raise ValueError("length_model: at most one")
    return importable(
        ProfileSnapshot(
            version=0,
            made_s=0.0,
            hardware=parts.get("hardware", ()),
            workload=parts.get("workload", ()),
            calibration=CalibrationTable(parts.get("calibration", ())),
            length_model=models[0] if models else NO_LENGTH_MODEL,
        )
    )


def _part(name: str, rows: object) -> tuple[Any, ...]:
    try:
        found: tuple[Any, ...] = _PARTS[name].validate_json(json.dumps(rows))
    except ValidationError as error:
        first = error.errors()[0]
        number, *field = first["loc"] or ("",)
        where = f"{name} row {number + 1}" if isinstance(number, int) else f"{name}.{number}" if number else name
        raise ValueError(f"{'.'.join([where, *map(str, field)])}: {first['msg'].removeprefix('Value error, ')}") from error
    except (TypeError, ValueError) as error:  # a date, a set, a tag: nothing that a row may hold
        raise ValueError(f"{name}: {error}") from error
    return found
