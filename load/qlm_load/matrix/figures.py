"""Margins of QLM over the other policies, cell by cell, and the figures made from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from scipy.special import stdtrit

from qlm_load.matrix.cells import BATCH_MAX, Cell
from qlm_load.matrix.runs import CellTask, Measures

QLM = "slo"
SHIPPED, BEST = "shipped", "best"
TARGETS = {SHIPPED: -1.0, BEST: -2.0}
"""Points that QLM may be below the best other policy: with the shipped batch, and with the best batch of that policy."""
INTERACTIVE, EVERY = "interactive", "every"
ONE_MODEL, OVERLOAD, DEMO, STEADY = "one_model_two_gpus", "overload", "demo", "steady_state"

Option = tuple[str, int]
"""A variant and its `batch_max`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Mean over seeds of QLM's points above `rival`, the best other one by its mean. `low`, `high`: 95% interval of paired seeds, the mean
    itself for one seed."""

    points: float
    low: float
    high: float
    rival: Option


@dataclass(slots=True, kw_only=True)
class CellRuns:
    """The runs of a cell, by option and seed."""

    cell: Cell
    runs: dict[Option, dict[int, Measures]] = field(default_factory=dict)

    def add(self, task: CellTask, measures: Measures) -> None:
        self.runs.setdefault((task.variant, task.batch_max), {})[task.seed] = measures

    def mean(self, option: Option, name: str) -> float:
        return float(np.mean([getattr(each, name) for each in self.runs[option].values()]))

    def rivals(self, kind: str) -> list[Option]:
        """Other policies without settings of their own: SHIPPED with the shipped batch, BEST with every batch of the runs."""
        return [option for option in self.runs if option[0] != QLM and "@" not in option[0] and (kind == BEST or option[1] == BATCH_MAX)]

    def best_rival(self, name: str, kind: str = SHIPPED) -> Option | None:
        """The one with the largest mean of a measure."""
        return max(self.rivals(kind), key=lambda option: self.mean(option, name), default=None)

    def margin(self, name: str, kind: str = SHIPPED) -> Margin | None:
        """None if QLM or all others did not run, or BEST if no other batch did."""
        rival = self.best_rival(name, kind)
        own = self.runs.get((QLM, BATCH_MAX))
        if rival is None or own is None or (kind == BEST and len(self.rivals(BEST)) == len(self.rivals(SHIPPED))):
            return None
        seeds = sorted(own.keys() & self.runs[rival].keys())
        if not seeds:
            return None
        above = np.array([getattr(own[seed], name) - getattr(self.runs[rival][seed], name) for seed in seeds])
        half = 0.0
        if len(seeds) > 1:
            half = float(stdtrit(len(seeds) - 1, 0.975) * above.std(ddof=1) / math.sqrt(len(seeds)))
        mean = float(above.mean())
        return Margin(points=round(mean, 2), low=round(mean - half, 2), high=round(mean + half, 2), rival=rival)

    def failures(self) -> list[str]:
        """The kinds whose target lies above the interval of the margin of all requests."""
        margins = {kind: self.margin(EVERY, kind) for kind in TARGETS}
        return [kind for kind, found in margins.items() if found is not None and found.high < TARGETS[kind]]

    def ratio(self, name: str, under: Option | None) -> float | None:
        """QLM's mean of a measure over that of another option."""
        if under is None or under not in self.runs or (QLM, BATCH_MAX) not in self.runs:
            return None
        return round(self.mean((QLM, BATCH_MAX), name) / max(self.mean(under, name), 1e-9), 3)


def document(found: Sequence[CellRuns], context: Mapping[str, object]) -> dict[str, object]:
    """All figures, then every cell with all of its runs. Keys that were not measured are null."""
    by_key = {each.cell.key: each for each in found}
    steady = {key: _alone(each) for key, each in by_key.items() if key.startswith(STEADY)}
    return {
        "least_margin": {kind: _over(found, EVERY, kind, min) for kind in TARGETS},
        "mean_margin": {
            "interactive": _over(found, INTERACTIVE, SHIPPED, _mean),
            "interactive_best": _over(found, INTERACTIVE, BEST, _mean),
            "all": _over(found, EVERY, SHIPPED, _mean),
        },
        ONE_MODEL: _alone(by_key[ONE_MODEL]) if ONE_MODEL in by_key else None,
        STEADY: steady or None,
        OVERLOAD: _overload(by_key[OVERLOAD]) if OVERLOAD in by_key else None,
        DEMO: dict(_by_option(by_key[DEMO])) if DEMO in by_key else None,
        "failed": {each.cell.key: each.failures() for each in found if each.failures()},
        **context,
        "cells": [_cell(each) for each in found],
    }


def _over(found: Sequence[CellRuns], name: str, kind: str, fold: Callable[[Sequence[float]], float]) -> float | None:
    points = [margin.points for each in found if (margin := each.margin(name, kind)) is not None]
    return round(fold(points), 2) if points else None


def _mean(points: Sequence[float]) -> float:
    return float(np.mean(points))


def _alone(each: CellRuns) -> dict[str, object] | None:
    """QLM's own figures, and its margins."""
    own = (QLM, BATCH_MAX)
    if own not in each.runs:
        return None
    names = {"interactive": INTERACTIVE, "all": EVERY, "makespan_s": "makespan_s", "backlog_s": "backlog_s"}
    return {key: round(each.mean(own, name), 2) for key, name in names.items()} | {"margins": _margins(each)}


def _margins(each: CellRuns) -> dict[str, dict[str, object] | None]:
    found = {f"{key}_{kind}": each.margin(name, kind) for key, name in (("interactive", INTERACTIVE), ("all", EVERY)) for kind in TARGETS}
    return {key: None if margin is None else asdict(margin) for key, margin in found.items()}


def _overload(each: CellRuns) -> dict[str, object]:
    """Ratios of QLM over others. `tokens_over`: over its own variants, such as one with the largest batch."""
    own = [option for option in each.runs if option[0].startswith(f"{QLM}@")]
    return {
        "in_time_tokens_over_best": each.ratio("in_time_tokens_per_s", each.best_rival("in_time_tokens_per_s")),
        "tokens_over_best": each.ratio("tokens_per_s", each.best_rival("tokens_per_s")),
        "tokens_over": {option[0]: each.ratio("tokens_per_s", option) for option in own},
    }


def _by_option(each: CellRuns) -> Iterator[tuple[str, dict[str, float]]]:
    for option in each.runs:
        name = option[0] if option[1] == BATCH_MAX else f"{option[0]} {option[1]}"
        yield name, {"interactive": round(each.mean(option, INTERACTIVE), 2), "all": round(each.mean(option, EVERY), 2)}


def _cell(each: CellRuns) -> dict[str, object]:
    cell = each.cell
    return {
        "key": cell.key,
        "models": [spec.profile for spec in cell.models],
        "gpus": cell.gpus,
        "arrivals": cell.arrivals,
        "lengths": cell.lengths,
        "rate_per_s": round(cell.rate_per_s, 3),
        "requests": cell.requests,
        "load": round(cell.load, 3),
        "inside": cell.inside,
        "margins": _margins(each),
        "failed": each.failures(),
        "runs": [
            {"variant": variant, "batch_max": batch_max, "seed": seed, **asdict(measures)}
            for (variant, batch_max), by_seed in each.runs.items()
            for seed, measures in by_seed.items()
        ],
    }
