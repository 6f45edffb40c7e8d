"""What pairs of measurements say of a ratio, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from scipy.stats import t as student

LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """`value`: geometric mean over the pairs; `low` to `high`: its interval at `LEVEL`, by Student's t on the logarithms; `median`: of the
    pairs' own ratios."""

    value: float
    low: float
    high: float
    median: float


def ratio_of_pairs(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours over theirs, both positive and measured in pairs. Raises ValueError for less than two pairs, or sides of different lengths."""
    logs = [math.log(own / other) for own, other in zip(ours, theirs, strict=True)]
    if len(logs) < 2:
        raise ValueError(f"{len(logs)} pairs give no interval")
    mean = fmean(logs)
    half = float(student.ppf((1.0 + LEVEL) / 2.0, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), median=math.exp(median(logs)))
