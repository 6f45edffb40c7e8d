"""Generated kinds of traffic, beside the public traces: each has one property that an estimator may fail on.

All are of FAMILY_REQUESTS requests with lengths from lognormals; a run stretches the arrivals to its load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from benchmarks.estimator.scores import Floats
from qlm_load.workload.trace import TraceRow

FAMILY_REQUESTS = 8_000
CHANGES_EVERY = 600
"""Requests of one kind of work in a row, where the kind changes."""
OUTPUTS_GROW = 4.0
"""Over a run whose outputs drift: the last are so many times as long as the first."""
BURST_REQUESTS = 40
"""Requests that arrive together in a burst, on average."""

Lengths = tuple[Floats, Floats]
Family = Callable[[np.random.Generator, int], tuple[Floats, Lengths]]


def family_rows(name: str, seed: int, count: int = FAMILY_REQUESTS) -> list[TraceRow]:
    """A family as the rows of a trace. Raises KeyError for an unknown name."""
    arrival_s, (prompts, outputs) = FAMILIES[name](np.random.default_rng(seed), count)
    return [
        TraceRow(arrival_s=at_s, input_tokens=max(1, round(prompt)), output_tokens=max(1, round(output)))
        for at_s, prompt, output in zip((arrival_s - arrival_s[0]).tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    ]


def _lengths(rng: np.random.Generator, count: int, prompt: float, output: float, spread: float = 0.6) -> Lengths:
    """Lognormal, with these medians and this deviation of the logarithm."""
    return prompt * np.exp(rng.normal(0.0, spread, count)), output * np.exp(rng.normal(0.0, spread, count))


def _poisson(rng: np.random.Generator, count: int) -> Floats:
    return np.cumsum(rng.exponential(1.0, count))


def _bursts(rng: np.random.Generator, count: int) -> Floats:
    """Poisson bursts of geometric size, each within the mean gap of two single requests."""
    gaps = np.where(rng.random(count) < 1.0 / BURST_REQUESTS, rng.exponential(BURST_REQUESTS, count), 0.01)
    return np.cumsum(gaps)


def _constant(rng: np.random.Generator, count: int) -> tuple[Floats, Lengths]:
    return _poisson(rng, count), (np.full(count, 500.0), np.full(count, 200.0))


def _report(rng: np.random.Generator, count: int) -> tuple[Floats, Lengths]:
    return _poisson(rng, count), _lengths(rng, count, 250.0, 900.0, 0.3)


def _prefill_bound(rng: np.random.Generator, count: int) -> tuple[Floats, Lengths]:
    return _bursts(rng, count), _lengths(rng, count, 2_000.0, 25.0)


def _bimodal(rng: np.random.Generator, count: int) -> tuple[Floats, Lengths]:
    long = rng.random(count) < 0.15
    short, longer = _lengths(rng, count, 200.0, 60.0), _lengths(rng, count, 300.0, 1_200.0, 0.3)
    return _poisson(rng, count), (np.where(long, longer[0], short[0]), np.where(long, longer[1], short[1]))


def _abrupt(rng: np.random.Generator, count: int) -> tuple[Floats, Lengths]:
    kinds = [_lengths(rng, count, *medians) for medians in ((400.0, 200.0), (2_500.0, 40.0), (200.0, 500.0))]
    kind = np.arange(count) // CHANGES_EVERY % len(kinds)
    prompts, outputs = (np.choose(kind, [each[part] for each in kinds]) for part in (0, 1))
    return _poisson(rng, count), (prompts, outputs)


def _drift(rng: np.random.Generator, count: int) -> tuple[Floats, Lengths]:
    prompts, outputs = _lengths(rng, count, 500.0, 80.0)
    return _poisson(rng, count), (prompts, outputs * OUTPUTS_GROW ** (np.arange(count) / count))


def _bursty(rng: np.random.Generator, count: int) -> tuple[Floats, Lengths]:
    return _bursts(rng, count), _lengths(rng, count, 500.0, 150.0)


def _heavy_tail(rng: np.random.Generator, count: int) -> tuple[Floats, Lengths]:
    prompts, _ = _lengths(rng, count, 500.0, 1.0)
    return _poisson(rng, count), (prompts, np.minimum(60.0 * (1.0 + rng.pareto(1.6, count)), 8_000.0))


FAMILIES: Mapping[str, Family] = {
    "constant": _constant,
    "report": _report,
    "prefill_bound": _prefill_bound,
    "bimodal": _bimodal,
    "abrupt": _abrupt,
    "drift": _drift,
    "bursts": _bursty,
    "heavy_tail": _heavy_tail,
}
