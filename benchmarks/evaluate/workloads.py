"""Jobs for one server: lengths of a public trace or of distributions like it, arrivals of a gamma process."""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from qlm_agent.engines.policies.port import QUANTILE_LEVELS

NORMAL_P90 = 1.2816

TOKENS_MAX = 1024
"""Longest prompt and answer: those of the traces."""
PREDICTOR_SIGMA = 0.5
"""Spread of the logarithm of predicted over true length, of the predictor that TRAIL and LTR use here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Prompts and answers of one data set, in tokens: pairs, one a job."""

    name: str
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Jobs in the order of their arrival. `errors`: logarithms of predicted over true length; without them nothing is predicted."""

    arrived_s: NDArray[np.float64]
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    errors: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.arrived_s)

    def quantiles(self) -> NDArray[np.float64]:
        """Predicted lengths (jobs, QUANTILE_LEVELS), lognormal; (jobs, 0) for none."""
        if self.errors is None:
            return np.empty((len(self), 0))
        levels = PREDICTOR_SIGMA * np.array([NormalDist().inv_cdf(level) for level in QUANTILE_LEVELS])
        return np.asarray(self.outputs[:, None] * np.exp(self.errors[:, None] + levels))


QUANTILES = {"sharegpt": ((20, 198), (217, 409)), "alpaca": ((11, 23), (37, 102))}
"""Median and 90th percentile of prompts and answers (the traces' own), of which lognormal lengths are made where no trace is given."""


def lengths(name: str, traces: Path | None, *, seed: int = 1, count: int = 20_000) -> Lengths:
    """Lengths of `lengths_<name>.csv.gz` in the folder of traces, else lognormal with the quantiles of QUANTILES."""
    if traces is not None:
        with gzip.open(traces / f"lengths_{name}.csv.gz", "rt", newline="") as file:
            rows = [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
        prompts, outputs = np.array(rows, np.int64).T
        return Lengths(name=name, prompts=np.maximum(prompts, 1), outputs=np.maximum(outputs, 1))
    dice = np.random.Generator(np.random.PCG64([seed, len(name)]))
    prompts, outputs = (
        np.clip(np.rint(median * (p90 / median) ** (dice.standard_normal(count) / NORMAL_P90)), 1, TOKENS_MAX).astype(np.int64)
        for median, p90 in QUANTILES[name]
    )
    return Lengths(name=name, prompts=prompts, outputs=outputs)


def jobs(source: Lengths, *, rate: float, duration_s: float, seed: int, cv: float = 1.0) -> Jobs:
    """Jobs of `duration_s` at `rate` a second. Gaps are gamma distributed with the coefficient of variation `cv`, 1 for Poisson arrivals;
    the draws of a seed are the same at every rate."""
    dice = np.random.Generator(np.random.PCG64([seed, 1]))
    count = max(1, round(rate * duration_s))
    gaps_s = dice.gamma(1.0 / cv**2, cv**2, count) / rate
    picks = np.random.Generator(np.random.PCG64([seed, 2])).integers(0, len(source.prompts), count)
    return Jobs(arrived_s=np.cumsum(gaps_s), prompts=source.prompts[picks], outputs=source.outputs[picks])
