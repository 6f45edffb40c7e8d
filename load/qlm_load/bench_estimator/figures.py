"""The figures of `bench estimator`: their names, what they are to be, and how they follow from what was judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from qlm_load.bench.figures import Figure
from qlm_load.bench_estimator import scores
from qlm_load.bench_estimator.scores import Judged

Z = {0.5: 0.0, 0.9: 1.2815515655446004, 0.99: 2.3263478740408408}
"""Quantiles of the standard normal by level."""

ACCURACY, SHIFTS, LENGTHS, SPEED = "accuracy", "shifts", "lengths", "speed"
TRACES = ("azure", "mooncake", "servegen")
SHIFT_NAMES = ("lengths_double", "throughput_halves")

FIGURES: Sequence[Figure] = (
    Figure(key="r2_wait_azure", part=ACCURACY, target=">= 0.99", least={"": 0.99}),
    Figure(key="r2_wait_mooncake", part=ACCURACY, target=">= 0.99", least={"": 0.99}),
    Figure(key="r2_wait_servegen", part=ACCURACY, target=">= 0.97", least={"": 0.97}),
    Figure(
        key="mape_wait_by_depth", part=ACCURACY, target="<= 15% beyond the first decile", points=TRACES, most=dict.fromkeys(TRACES, 15.0)
    ),
    Figure(key="r2_wait_multi", part=ACCURACY, target=">= 0.97", least={"": 0.97}),
    Figure(key="r2_completion", part=ACCURACY, target=">= 0.95", least={"": 0.95}),
    Figure(
        key="p90_coverage",
        part=ACCURACY,
        target="mean 88 to 92, worst 80 to 97",
        points=("mean", "worst"),
        least={"mean": 88.0, "worst": 80.0},
        most={"mean": 92.0, "worst": 97.0},
    ),
    Figure(
        key="p90_coverage_after_shift",
        part=SHIFTS,
        target="85 to 95",
        points=SHIFT_NAMES,
        least=dict.fromkeys(SHIFT_NAMES, 85.0),
        most=dict.fromkeys(SHIFT_NAMES, 95.0),
    ),
    Figure(key="predictions_per_s", part=SPEED, target=">= 1,000,000", points=("vectorised", "scalar"), least={"vectorised": 1e6}),
    Figure(key="assess_ms", part=SPEED, target="<= 10", most={"": 10.0}),
    Figure(
        key="length_mae_gain",
        part=LENGTHS,
        target="servegen >= 10%, azure and mooncake >= 0",
        points=("servegen", "azure", "mooncake"),
        least={"servegen": 10.0, "azure": 0.0, "mooncake": 0.0},
    ),
)
BY_KEY: Mapping[str, Figure] = {figure.key: figure for figure in FIGURES}

RUN_OF = {"r2_wait_azure": ("azure",), "r2_wait_mooncake": ("mooncake",), "r2_wait_servegen": ("servegen",), "r2_wait_multi": ("multi",)}
"""Runs that a key needs; others of the accuracy part need all of them."""


def runs_of(keys: Sequence[str]) -> tuple[str, ...]:
    """The runs that the keys need, in a fixed order."""
    wanted: set[str] = set()
    for key in keys:
        figure = BY_KEY[key]
        if figure.part == SHIFTS:
            wanted.update(SHIFT_NAMES)
        elif figure.part == ACCURACY:
            wanted.update(RUN_OF.get(key, TRACES if key == "mape_wait_by_depth" else (*TRACES, "multi")))
    return tuple(name for name in (*TRACES, "multi", *SHIFT_NAMES) if name in wanted)


def r2_wait(judged: Judged) -> float:
    return round(scores.r2(judged.wait_s, judged.actual_wait_s), 5)


def r2_completion(judged: Judged) -> float:
    return round(scores.r2(judged.completion_s, judged.actual_completion_s), 5)


def details(judged: Judged) -> dict[str, object]:
    """All that is said of one run with one seed."""
    wait, done = judged.actual_wait_s, judged.actual_completion_s
    return {
        "judged": len(judged),
        "wait_mean_s": round(float(wait.mean()), 2),
        "wait_max_s": round(float(wait.max()), 2),
        "r2_wait": r2_wait(judged),
        "r2_completion": r2_completion(judged),
        "bias_wait_s": round(float((wait - judged.wait_s).mean()), 3),
        "bias_completion_s": round(float((done - judged.completion_s).mean()), 3),
        "mape_wait_by_depth": scores.mape_by_depth(judged),
        "wait_within": {f"p{level * 100:.0f}": round(scores.coverage(judged.wait_within(z)), 2) for level, z in Z.items()},
        "completion_within": {f"p{level * 100:.0f}": round(scores.coverage(judged.completion_within(z)), 2) for level, z in Z.items()},
        "p90_wait_cells": scores.coverage_cells(judged, judged.wait_within(Z[0.9])),
        "p90_completion_cells": scores.coverage_cells(judged, judged.completion_within(Z[0.9])),
    }


def p90_cells(runs: Mapping[str, Sequence[Judged]]) -> dict[str, list[float]]:
    """Percent of waits within their p90, for each decile of depth of each model, over all seeds and all runs of that model: the single
    model of the traces, and the three models of the run with swaps."""
    cells: dict[str, list[float]] = {}
    singles = [judged for name in TRACES for judged in runs.get(name, ())]
    if singles:
        one = _same_model(singles)
        cells["single"] = scores.coverage_cells(one, one.wait_within(Z[0.9]))["0"]
    if runs.get("multi"):
        several = _joined(runs["multi"])
        for model, found in scores.coverage_cells(several, several.wait_within(Z[0.9])).items():
            cells[f"multi {model}"] = found
    return cells


def _joined(parts: Sequence[Judged]) -> Judged:
    return Judged(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Judged.__slots__})


def _same_model(parts: Sequence[Judged]) -> Judged:
    """Deciles are of each part's own depths, so that each trace and seed is in all of them: depth becomes the rank in its part."""
    whole = _joined(parts)
    ranks = np.concatenate([np.argsort(np.argsort(part.depth, kind="stable")) / max(1, len(part)) for part in parts])
    return Judged(**{name: ranks if name == "depth" else getattr(whole, name) for name in Judged.__slots__})
