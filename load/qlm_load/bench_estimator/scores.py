"""How good predictions were: shares of the variance explained, errors by depth, coverage of quantiles. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DECILES = 10
LEVELS = (0.5, 0.9, 0.99)
"""Quantiles that are judged."""


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """Predictions made at arrival and what came, one place for each request, in the order of arrival. Seconds from the arrival; `depth`:
    requests ahead; `model`: its number; `*_deviation_s`: of the normal that was predicted."""

    arrival_s: Floats
    model: NDArray[np.int64]
    depth: Floats
    wait_s: Floats
    wait_deviation_s: Floats
    actual_wait_s: Floats
    completion_s: Floats
    completion_deviation_s: Floats
    actual_completion_s: Floats

    def __len__(self) -> int:
        return len(self.depth)

    def where(self, chosen: NDArray[np.bool_]) -> Judged:
        """Only some of them."""
        return Judged(**{name: getattr(self, name)[chosen] for name in self.__slots__})

    def wait_within(self, level_deviations: float) -> NDArray[np.bool_]:
        """Whether the wait came by the quantile so many deviations above the mean; no quantile is below zero."""
        return self.actual_wait_s <= np.maximum(0.0, self.wait_s + level_deviations * self.wait_deviation_s)

    def completion_within(self, level_deviations: float) -> NDArray[np.bool_]:
        """The same of the completion."""
        return self.actual_completion_s <= np.maximum(0.0, self.completion_s + level_deviations * self.completion_deviation_s)


def together(parts: Sequence[Judged]) -> Judged:
    """All of them, with the models of each part counted on from those before it."""
    first = np.cumsum([0, *(int(part.model.max(initial=-1)) + 1 for part in parts)])
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Judged.__slots__}
    columns["model"] = np.concatenate([part.model + offset for part, offset in zip(parts, first, strict=False)])
    return Judged(**columns)


def r2(predicted: Floats, actual: Floats) -> float:
    """1 - (sum of squared errors) / (sum of squares around the mean); 0 where all that happened took equally long."""
    around = float(((actual - actual.mean()) ** 2).sum())
    return 1.0 - float(((predicted - actual) ** 2).sum()) / around if around > 0.0 else 0.0


def by_depth(depth: Floats) -> list[NDArray[np.int64]]:
    """Places in ten parts of equal size, by depth; equal depths stay in the order of arrival."""
    return np.array_split(np.argsort(depth, kind="stable"), DECILES)


def mape_by_depth(judged: Judged) -> list[float]:
    """Mean absolute error over the mean of what happened, for each decile of depth, in percent: weighted so that a wait of nothing cannot
    count infinitely."""
    return [
        round(100.0 * float(np.abs(judged.wait_s[at] - judged.actual_wait_s[at]).sum() / max(1e-9, judged.actual_wait_s[at].sum())), 2)
        for at in by_depth(judged.depth)
    ]


def coverage(within: NDArray[np.bool_]) -> float:
    """Percent."""
    return 100.0 * float(within.mean())


def coverage_cells(judged: Judged, within: NDArray[np.bool_]) -> dict[str, list[float]]:
    """Percent within, for each decile of depth of each model."""
    cells: dict[str, list[float]] = {}
    for model in np.unique(judged.model).tolist():
        places = np.flatnonzero(judged.model == model)
        cells[str(model)] = [round(coverage(within[places[at]]), 2) for at in by_depth(judged.depth[places])]
    return cells


def farthest(values: Sequence[float], target: float) -> float:
    """The value that is farthest from the target."""
    return max(values, key=lambda value: abs(value - target))


def spread(values: Sequence[float]) -> Mapping[str, float]:
    """Of the same figure over seeds."""
    found = np.array(values)
    return {"mean": float(found.mean()), "min": float(found.min()), "max": float(found.max())}
