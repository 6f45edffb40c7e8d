"""The table of constants (docs/reference/constants.md) names each of the estimator and of the formulas, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "constants.md"
FORMULAS = (
    "batch_mix", "calibration", "hardware_prior", "hardware_profile", "importable_profiles", "instance", "length_curve",
    "length_features", "length_model", "normal_arrays", "planned_waits", "prediction_service", "profile", "queue_model", "queue_times",
    "run_lengths", "workload_profile",
)  # fmt: skip
SHAPES = {"SUMS", "ENDS", "SERVING", "EXACT_TOKENS_MAX", "BINS_PER_DOUBLING"}
"""Say how an array is laid out."""
DEFAULTS = {"Efficiency", "Learning"}
"""Classes whose fields have constants as defaults."""


def _names(node: ast.stmt) -> list[str]:
    """Constants that a statement assigns numbers to, and the fields of DEFAULTS."""
    if isinstance(node, ast.ClassDef) and node.name in DEFAULTS:
        return [
            f"{node.name}.{each.target.id}" for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
    if isinstance(node, ast.Assign):
        (target,), value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target, value = node.target, node.value
    else:
        return []
    counted = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "range"
    numbers = [each for each in ast.walk(value) if isinstance(each, ast.Constant) and type(each.value) in (int, float)]
    texts = [each for each in ast.walk(value) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if counted or texts or not numbers:
        return []
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    return [each.id for each in targets if isinstance(each, ast.Name) and re.fullmatch("[A-Z][A-Z0-9_]+", each.id)]


def _constants() -> set[str]:
    estimator, core = ROOT / "services" / "estimator", ROOT / "src"
    paths = [(estimator, path) for path in estimator.rglob("*.py")] + [
        (core, next((core / "qlm_core").glob(f"*/{name}.py"))) for name in FORMULAS
    ]
    return {
        f"{'.'.join(path.relative_to(root).with_suffix('').parts)}.{name}"
        for root, path in paths
        for node in ast.parse(path.read_text()).body
        for name in _names(node)
        if name not in SHAPES
    }


def test_every_constant_is_in_the_table_and_no_other() -> None:
    named = set(re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text(), re.MULTILINE))
    assert named == _constants()
