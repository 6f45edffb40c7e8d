"""Open-loop schedules, and summaries of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from qlm_load.replay.ledger import quantile


def poisson_times(seed: int, rate_per_s: float, seconds: float) -> list[float]:
    """Arrival times of a Poisson process, in seconds from its start, all below `seconds`. They are drawn before the run, so that nothing in
    it moves them: a late answer delays no later request (no coordinated omission)."""
    if not rate_per_s > 0.0 or not seconds > 0.0:
        raise ValueError(f"rate and seconds are > 0, got {rate_per_s} and {seconds}")
    generator = np.random.Generator(np.random.PCG64([seed, 0x706F69]))
    return list(_below(seconds, rate_per_s, generator))


def _below(seconds: float, rate_per_s: float, generator: np.random.Generator) -> Iterator[float]:
    at_s = 0.0
    while True:
        # Inverse CDF of the exponential distribution: the same numbers with every version of numpy.
        at_s -= float(np.log1p(-generator.random())) / rate_per_s
        if at_s >= seconds:
            return
        yield at_s


def summary_ms(samples_s: Sequence[float]) -> dict[str, float]:
    """Samples in seconds -> their number, p50, p90, p99 and the largest, in milliseconds."""
    return {
        "n": len(samples_s),
        "p50": round(quantile(samples_s, 0.5) * 1e3, 3),
        "p90": round(quantile(samples_s, 0.9) * 1e3, 3),
        "p99": round(quantile(samples_s, 0.99) * 1e3, 3),
        "max": round(max(samples_s, default=0.0) * 1e3, 3),
    }
