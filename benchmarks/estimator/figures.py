"""The figures of `benchmarks estimator`: their names, what they are to be, and how they follow from what was judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.estimator import scores
from benchmarks.estimator.families import FAMILIES
from benchmarks.estimator.runs import MULTI, SHIFTS, Run
from benchmarks.estimator.scores import LEVELS, Judged
from benchmarks.figures import Figure, Value, Values

RUNS, LENGTHS, SPEED = "runs", "lengths", "speed"
TRACES = ("azure", "azure_code", "mooncake", "servegen_small", "servegen_mid")
"""Runs of one model; of ServeGen each model of the trace by itself."""
SINGLES = (*TRACES, *FAMILIES)
CHANGING = ("abrupt", "drift", "azure", "servegen_small", "servegen_mid")
"""Runs whose work changes: kinds, lengths by a drift, and traces of an hour or six."""
MULTIS = tuple(MULTI + name for name in ("azure", "azure_code", *FAMILIES))
"""Runs of three models on two GPUs. (Mooncake's and ServeGen's take an hour each.)"""
SHIFT_NAMES = tuple(SHIFTS)
HIGH = dict.fromkeys(("azure", "mooncake", "servegen_small", "servegen_mid"), 0.99)
CELL_MIN = 200
"""Ends that a cell of coverage needs at least."""
LENGTH_TRACES = ("servegen", "azure", "azure_code", "mooncake")

FIGURES: Sequence[Figure] = (
    Figure(
        key="r2_wait",
        part=RUNS,
        target=">= 0.95; azure, mooncake, servegen >= 0.99",
        points=("least", *SINGLES),
        least={**dict.fromkeys(("least", *SINGLES), 0.95), **HIGH},
    ),
    Figure(
        key="r2_behind_oracle",
        part=RUNS,
        target="<= 0.03 where r2_wait is below 0.95",
        points=("most", *SINGLES),
        most={"most": 0.03},
    ),
    *(Figure(key=f"r2_wait_{name}", part=RUNS, target=">= 0.99", least={"": 0.99}) for name in ("azure", "mooncake")),
    Figure(
        key="bias_share",
        part=RUNS,
        target="<= 3%, <= 8%",
        points=("stationary", "changing"),
        most={"stationary": 3.0, "changing": 8.0},
    ),
    Figure(
        key="r2_wait_multi",
        part=RUNS,
        target="least >= 0.85, mean >= 0.95",
        points=("least", "mean", *MULTIS),
        least={"least": 0.85, "mean": 0.95},
    ),
    Figure(key="r2_completion", part=RUNS, target="stated", points=SINGLES),
    Figure(key="r2_completion_waits_known", part=RUNS, target="stated: waits known, each run as long as their mean", points=SINGLES),
    Figure(
        key="p90_coverage",
        part=RUNS,
        target="mean 87 to 93, worst decile >= 75",
        points=("mean", "worst_decile"),
        least={"mean": 87.0, "worst_decile": 75.0},
        most={"mean": 93.0},
    ),
    Figure(key="p90_coverage_cold", part=RUNS, target=">= 80", points=("least", *SINGLES), least={"least": 80.0}),
    Figure(
        key="p90_coverage_after_change",
        part=RUNS,
        target="80 to 96",
        points=SHIFT_NAMES,
        least=dict.fromkeys(SHIFT_NAMES, 80.0),
        most=dict.fromkeys(SHIFT_NAMES, 96.0),
    ),
    Figure(
        key="sharpness",
        part=RUNS,
        target="p90 - p50 over the mean wait, <= 1.5 times that of the run's own residuals",
        points=("mean", "mean_of_residuals"),
    ),
    Figure(key="predictions_per_s", part=SPEED, target=">= 1,000,000", points=("vectorised",), least={"vectorised": 1e6}),
    Figure(key="assess_ms", part=SPEED, target="<= 10", most={"": 10.0}),
    Figure(
        key="length_mae_gain",
        part=LENGTHS,
        target="servegen >= 10%, others >= 0",
        points=LENGTH_TRACES,
        least={name: 10.0 if name == "servegen" else 0.0 for name in LENGTH_TRACES},
    ),
)
BY_KEY: Mapping[str, Figure] = {figure.key: figure for figure in FIGURES}

RUNS_OF: Mapping[str, tuple[str, ...]] = {
    "r2_wait": SINGLES,
    "r2_behind_oracle": SINGLES,
    "r2_wait_azure": ("azure",),
    "r2_wait_mooncake": ("mooncake",),
    "bias_share": SINGLES,
    "r2_wait_multi": MULTIS,
    "r2_completion": SINGLES,
    "r2_completion_waits_known": SINGLES,
    "p90_coverage": (*SINGLES, *MULTIS),
    "p90_coverage_cold": SINGLES,
    "p90_coverage_after_change": SHIFT_NAMES,
    "sharpness": SINGLES,
}
"""Runs that a key needs."""


def runs_of(keys: Sequence[str]) -> tuple[str, ...]:
    """The runs that the keys need, in a fixed order."""
    wanted = {name for key in keys for name in RUNS_OF.get(key, ())}
    return tuple(name for name in (*SINGLES, *MULTIS, *SHIFT_NAMES) if name in wanted)


def values_of(keys: Sequence[str], runs: Mapping[str, Sequence[Run]]) -> Values:
    """The figures of the keys that rest on runs: each as the mean over the seeds, the least and the worst over all of them."""
    values: Values = {}
    mean = {name: {what: _mean([details(run)[what] for run in found]) for what in MEANS} for name, found in runs.items()}

    def each(what: str, names: Sequence[str]) -> dict[str, Value]:
        return {name: mean[name][what] for name in names}

    if "r2_wait" in keys:
        values["r2_wait"] = {"least": min(mean[name]["r2_wait"] for name in SINGLES), **each("r2_wait", SINGLES)}
    if "r2_behind_oracle" in keys:
        behind = {name: _mean(gaps) for name in SINGLES if (gaps := [gap for run in runs[name] if (gap := r2_behind(run)) is not None])}
        values["r2_behind_oracle"] = {"most": max(behind.values(), default=0.0), **behind}
    for name in ("azure", "mooncake"):
        if f"r2_wait_{name}" in keys:
            values[f"r2_wait_{name}"] = mean[name]["r2_wait"]
    if "bias_share" in keys:
        biases = {name: max(abs(details(run)["bias_percent"]) for run in runs[name]) for name in SINGLES}
        values["bias_share"] = {
            "stationary": max(bias for name, bias in biases.items() if name not in CHANGING),
            "changing": max(bias for name, bias in biases.items() if name in CHANGING),
        }
    if "r2_wait_multi" in keys:
        found = each("r2_wait", MULTIS)
        values["r2_wait_multi"] = {"least": min(mean[name]["r2_wait"] for name in MULTIS), "mean": _mean([*_known(found)]), **found}
    for key in ("r2_completion", "r2_completion_waits_known"):
        if key in keys:
            values[key] = each(key, SINGLES)
    if "p90_coverage" in keys:
        names = (*SINGLES, *MULTIS)
        cells = [cell for name in names for cell in p90_cells([run.judged for run in runs[name]])]
        values["p90_coverage"] = {
            "mean": _mean([mean[name]["p90_wait"] for name in names]),
            "worst_decile": round(min(cells), 2) if cells else None,
        }
    if "p90_coverage_cold" in keys:
        values["p90_coverage_cold"] = {"least": min(mean[name]["p90_cold"] for name in SINGLES), **each("p90_cold", SINGLES)}
    if "p90_coverage_after_change" in keys:
        values["p90_coverage_after_change"] = each("p90_wait", SHIFT_NAMES)
    if "sharpness" in keys:
        values["sharpness"] = {
            "mean": _mean([mean[name]["sharpness"] for name in SINGLES]),
            "mean_of_residuals": _mean([mean[name]["sharpness_of_residuals"] for name in SINGLES]),
        }
    return values


MEANS = ("r2_wait", "r2_completion", "r2_completion_waits_known", "p90_wait", "p90_cold", "sharpness", "sharpness_of_residuals")
"""Keys of `details`, reported as means over the seeds."""


def r2_behind(run: Run) -> float | None:
    """By how much the R2 of the wait is below that of an estimator that knows each class's current mean; None where that was not run."""
    if run.oracle is None:
        return None
    best, judged = run.oracle, run.judged
    return scores.r2(best.wait_s, best.actual_wait_s) - scores.r2(judged.wait_s, judged.actual_wait_s)


def details(run: Run) -> dict[str, float]:
    """All that is said of one run with one seed."""
    judged, cold = run.judged, run.cold
    wait, done = judged.actual_wait_s, judged.actual_completion_s
    late = wait - judged.wait_s
    mean_s = max(1e-9, float(wait.mean()))
    found = {
        "judged": float(len(judged)),
        "wait_mean_s": float(wait.mean()),
        "wait_max_s": float(wait.max()),
        "wait_deviation_s": float(wait.std()),
        "error_deviation_s": float(late.std()),
        "service_deviation_s": float((done - wait).std()),
        "r2_wait": scores.r2(judged.wait_s, wait),
        "r2_completion": scores.r2(judged.completion_s, done),
        "r2_completion_waits_known": scores.r2(wait + (done - wait).mean(), done),
        "bias_wait_s": float(late.mean()),
        "bias_percent": 100.0 * float(late.mean()) / mean_s,
        "bias_completion_s": float((done - judged.completion_s).mean()),
        "p90_cold": scores.coverage(cold.wait_within(0.9)),
        "sharpness": float((judged.wait_p90_s - judged.wait_s).mean()) / mean_s,
        "sharpness_of_residuals": float(np.quantile(late, 0.9) - np.quantile(late, 0.5)) / mean_s,
    }
    found |= {f"p{level * 100:.0f}_wait": scores.coverage(judged.wait_within(level)) for level in LEVELS}
    found |= {f"p{level * 100:.0f}_completion": scores.coverage(judged.completion_within(level)) for level in LEVELS}
    if run.oracle is not None:
        found["r2_wait_oracle"] = scores.r2(run.oracle.wait_s, run.oracle.actual_wait_s)
    return {name: round(value, 5) for name, value in found.items()}


def p90_cells(parts: Sequence[Judged]) -> list[float]:
    """Percent of waits within their p90, for each decile of depth of each model over all seeds of a run, of CELL_MIN ends at least."""
    whole = Judged(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Judged.__slots__})
    within = whole.wait_within(0.9)
    cells: list[float] = []
    for model in np.unique(whole.model).tolist():
        places = np.flatnonzero(whole.model == model)
        cells += [scores.coverage(within[places[at]]) for at in scores.by_depth(whole.depth[places]) if len(at) >= CELL_MIN]
    return cells


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 5)


def _known(found: Mapping[str, Value]) -> list[float]:
    return [value for value in found.values() if value is not None]
