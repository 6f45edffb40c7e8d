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
SERVEGEN = ("servegen_small", "servegen_mid")
"""Each a model of the trace by itself."""
SINGLES = ("azure", "mooncake", *SERVEGEN)
"""Runs of one model, which the figures are over."""
BESIDE = ("servegen_large", "servegen_mixed")
"""Told beside the figures: a model of which three batches wait at the most, so that completions are mostly its own answers; and all of the
trace's models as one."""
POINTS = {"azure": ("azure",), "mooncake": ("mooncake",), "servegen": SERVEGEN}
"""Runs behind the points of a figure by trace; of several the worst counts."""
SHIFT_NAMES = ("lengths_double", "throughput_halves")

FIGURES: Sequence[Figure] = (
    Figure(key="r2_wait_azure", part=ACCURACY, target=">= 0.99", least={"": 0.99}),
    Figure(key="r2_wait_mooncake", part=ACCURACY, target=">= 0.99", least={"": 0.99}),
    Figure(key="r2_wait_servegen", part=ACCURACY, target=">= 0.97", least={"": 0.97}),
    *(Figure(key=name, part=ACCURACY, target="stated", points=("r2_wait", "r2_completion", "p90_wait")) for name in BESIDE),
    Figure(
        key="mape_wait_by_depth",
        part=ACCURACY,
        target="<= 15% beyond the first decile",
        points=(*POINTS,),
        most=dict.fromkeys(POINTS, 15.0),
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

RUNS_OF = {
    "r2_wait_azure": ("azure",),
    "r2_wait_mooncake": ("mooncake",),
    "r2_wait_servegen": (*SERVEGEN, *BESIDE),
    **{name: (name,) for name in BESIDE},
    "r2_wait_multi": ("multi",),
    "mape_wait_by_depth": (*SINGLES, *BESIDE),
    "r2_completion": (*SINGLES, *BESIDE),
    "p90_coverage": (*SINGLES, *BESIDE, "multi"),
    "p90_coverage_after_shift": SHIFT_NAMES,
}
"""Runs that a key needs."""


def runs_of(keys: Sequence[str]) -> tuple[str, ...]:
    """The runs that the keys need, in a fixed order."""
    wanted = {name for key in keys for name in RUNS_OF.get(key, ())}
    return tuple(name for name in (*SINGLES, *BESIDE, "multi", *SHIFT_NAMES) if name in wanted)


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
        "wait_deviation_s": round(float(wait.std()), 2),
        "error_deviation_s": round(float((wait - judged.wait_s).std()), 2),
        "service_deviation_s": round(float((done - wait).std()), 2),
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
    model of SINGLES, and the three models of the run with swaps."""
    cells: dict[str, list[float]] = {}
    singles = [judged for name in SINGLES for judged in runs.get(name, ())]
    if singles:
        cells["single"] = run_cells(singles)
    if runs.get("multi"):
        several = _joined(runs["multi"])
        for model, found in scores.coverage_cells(several, several.wait_within(Z[0.9])).items():
            cells[f"multi {model}"] = found
    return cells


def run_cells(parts: Sequence[Judged]) -> list[float]:
    """Percent of waits within their p90, for each decile of depth, of runs of one model together."""
    one = _same_model(parts)
    return scores.coverage_cells(one, one.wait_within(Z[0.9]))["0"]


def _joined(parts: Sequence[Judged]) -> Judged:
    return Judged(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Judged.__slots__})


def _same_model(parts: Sequence[Judged]) -> Judged:
    """Deciles are of each part's own depths, so that each trace and seed is in all of them: depth becomes the rank in its part."""
    whole = _joined(parts)
    ranks = np.concatenate([np.argsort(np.argsort(part.depth, kind="stable")) / max(1, len(part)) for part in parts])
    return Judged(**{name: ranks if name == "depth" else getattr(whole, name) for name in Judged.__slots__})
