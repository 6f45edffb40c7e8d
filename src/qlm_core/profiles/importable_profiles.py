"""Rows of a snapshot that may be imported into the estimator, and whether they are sound together.

Each row by itself was checked when it was made; here are the contradictions: between two rows, between a row and what is published of its
GPU, and within a learned row.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from qlm_core.profiles.hardware_prior import gpu_facts
from qlm_core.profiles.hardware_profile import AS_PROFILED, ORIGIN_MEASURED, TIMED_OPERATIONS, HardwareProfile, OperationSlowdown
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.length_curve import TOKENS_MAX
from qlm_core.statistics.length_model import TOTAL_MAX, LengthModel

ROWS_MAX = 4096
"""Most rows of one kind in an import."""

SLOWDOWN_MAX = 16.0
"""An instance is learned to be at most so many times slower or faster than its pair's row."""

LENGTH_SAMPLES_MAX = 1e9
"""Requests that a length model was compared on, at the most."""

BIAS_MAX = 16.0
"""Times are predicted at most so many times too long or too short."""

SIZE_ERROR_MAX = 0.02
"""Rows of one model agree on the size of its weights within this, relative."""


def importable(snapshot: ProfileSnapshot) -> ProfileSnapshot:
    """The rows that an import takes: all but those that QLM ships and those that follow from facts, which the importing estimator has
    itself. Raises ValueError, naming the row: two of one key, or figures that contradict each other; or no rows at all."""
    hardware = tuple(row for row in snapshot.hardware if row.instance or row.origin == ORIGIN_MEASURED)
    for name, rows in (("hardware", hardware), ("workload", snapshot.workload)):
        if len(rows) > ROWS_MAX:
            raise ValueError(f"at most {ROWS_MAX} {name} rows, got {len(rows)}")
    if not hardware and not snapshot.workload:
        raise ValueError("there are no rows to import: those that QLM ships, and those that follow from facts, are left out")
    _each_once("hardware profile", ((row.instance, row.model) if row.instance else row.key for row in hardware))
    _each_once("workload profile", (row.key for row in snapshot.workload))
    for row in hardware:
        _check_row(row)
    _check_sizes(hardware)
    _check_length_model(snapshot.length_model)
    for calibrated in snapshot.calibration.rows:
        if not 1.0 / BIAS_MAX <= calibrated.bias_factor <= BIAS_MAX:
            raise ValueError(f"calibration {calibrated.key}: bias_factor is from 1/{BIAS_MAX:g} to {BIAS_MAX:g}")
    return replace(snapshot, hardware=hardware)


def _each_once(what: str, keys: Iterable[Hashable]) -> None:
    seen: set[Hashable] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"{what} {key}: given twice")
        seen.add(key)


def _check_row(row: HardwareProfile) -> None:
    name = f"hardware profile {row.gpu} x{row.n_gpu} {row.model}" + (f" of {row.instance}" if row.instance else "")
    if not (row.gpu and row.model):
        raise ValueError(f"{name}: gpu and model are names")
    if row.instance and not 1.0 / SLOWDOWN_MAX <= row.slowdown <= SLOWDOWN_MAX:
        raise ValueError(f"{name}: slowdown is from 1/{SLOWDOWN_MAX:g} to {SLOWDOWN_MAX:g}, got {row.slowdown:g}")
    if row.instance and row.samples == 0 and row.slowdown != 1.0:
        raise ValueError(f"{name}: a slowdown of {row.slowdown:g} contradicts samples of 0")
    for operation in TIMED_OPERATIONS:
        _check_operation(f"{name}: {operation}", row, getattr(row, operation))
    if not row.instance and (row.slowdown != 1.0 or row.samples):
        raise ValueError(f"{name}: slowdown and samples are of an instance, and the row names none")
    facts = gpu_facts().get(row.gpu)
    used_gb = row.weights_gb + row.kv_capacity_tokens * row.kv_bytes_per_token * 1e-9
    if facts is not None and used_gb > row.n_gpu * facts.memory_gb:
        raise ValueError(f"{name}: weights and KV take {used_gb:.1f} GB, which contradicts {row.n_gpu} x {facts.memory_gb:g} GB of memory")


def _check_operation(name: str, row: HardwareProfile, operation: OperationSlowdown) -> None:
    if operation == AS_PROFILED:
        return
    if not row.instance:
        raise ValueError(f"{name} is of an instance, and the row names none")
    if not 1.0 / SLOWDOWN_MAX <= operation.slowdown <= SLOWDOWN_MAX:
        raise ValueError(f"{name}: slowdown is from 1/{SLOWDOWN_MAX:g} to {SLOWDOWN_MAX:g}, got {operation.slowdown:g}")
    if operation.prior_share == 1.0 and operation.slowdown != 1.0:
        raise ValueError(f"{name}: a slowdown of {operation.slowdown:g} contradicts a prior's share of 1")


def _check_length_model(model: LengthModel) -> None:
    if any(abs(weight) > TOTAL_MAX for weight in model.weights):
        raise ValueError(f"length model: weights are logarithms from -{TOTAL_MAX:g} to {TOTAL_MAX:g}")
    if max(model.curvatures, default=0.0) > LENGTH_SAMPLES_MAX:
        raise ValueError(f"length model: curvatures are at most {LENGTH_SAMPLES_MAX:g}")
    for score in model.scores:
        if max(score.median_error_tokens, score.model_error_tokens) > TOKENS_MAX or score.samples > LENGTH_SAMPLES_MAX:
            raise ValueError(f"length score of {score.model}: errors are at most {TOKENS_MAX} tokens, samples {LENGTH_SAMPLES_MAX:g}")


def _check_sizes(rows: Iterable[HardwareProfile]) -> None:
    first: dict[str, HardwareProfile] = {}
    for row in rows:
        other = first.setdefault(row.model, row)
        if row.kv_bytes_per_token != other.kv_bytes_per_token:
            raise ValueError(
                f"{row.model}: kv_bytes_per_token of {row.kv_bytes_per_token} and {other.kv_bytes_per_token} contradict each other"
            )
        if abs(row.weights_gb - other.weights_gb) > SIZE_ERROR_MAX * other.weights_gb:
            raise ValueError(f"{row.model}: weights_gb of {row.weights_gb:g} and {other.weights_gb:g} contradict each other")
