"""The hardware profile that explains measurements best: robust least squares on relative errors (QLM section 6: Theta, P, d and epsilon).

Every observation weighs by its precision: a window of k decode steps with noise s on each has a relative error of s / sqrt(k). Outliers (a
step during which the host was busy otherwise) are damped by a soft L1 loss. Intervals are the usual ones of least squares at the optimum,
from the Jacobian and the residuals, at 95%. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from scipy.special import stdtrit

from qlm_agent.profiling.measurements import DecodeWindow, KvTransfer, Measurements, Prefill

OUTLIER = 0.1
"""Relative error, of one step or one prefill, beyond which an observation is damped."""

PRIOR_RESIDUAL = 0.1
"""Residual of a figure that is twice its prior: a prior that holds to within 50% counts as much as a prefill that is known to 5%."""

CONFIDENCE = 0.95

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A fitted value with its 95% interval, None if unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    def scaled(self, factor: float) -> Figure:
        """In another unit."""
        low, high = (None if bound is None else factor * bound for bound in (self.low, self.high))
        return Figure(value=factor * self.value, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The result of a fit. `figures`: fields of `HardwareProfile` by name; unmeasured ones are missing. `decode_error`, `prefill_error`:
    root mean square of the relative residuals. `theta_tokens_per_s`: output tokens a second of the largest batch."""

    figures: dict[str, Figure]
    decode_error: float
    prefill_error: float
    theta_tokens_per_s: float
    theta_sequences: int


def fit(measured: Measurements, quadratic_prior: float = 0.0) -> Fit:
    """`quadratic_prior`: of `prefill_ms_per_token_squared`, to within half of it; 0: none. Short contexts show little of it. Raises
    ValueError if the measurements are too few to separate base, sequences and context."""
    decode, decode_error = _decode(measured.windows)
    prefill, prefill_error = _prefill(
        [each for each in measured.prefills if not each.resumed], measured.prefill_chunk_tokens, quadratic_prior
    )
    figures = {**decode, **prefill}
    figures |= {
        name: found
        for name, found in (
            ("load_disk_to_cpu_s", _mean(measured.loads_cold_s)),
            ("load_cpu_to_gpu_s", _mean(measured.loads_warm_s)),
            *_transfer(measured.offloads),
            ("recompute_us_per_token", _recompute(measured, prefill)),
        )
        if found is not None
    }
    largest = max(measured.windows, key=lambda window: (window.sequences, -window.context_tokens))
    return Fit(
        figures=figures,
        decode_error=decode_error,
        prefill_error=prefill_error,
        theta_tokens_per_s=largest.sequences * largest.steps / largest.seconds,
        theta_sequences=largest.sequences,
    )


def _decode(windows: Sequence[DecodeWindow]) -> tuple[dict[str, Figure], float]:
    """a, b and c of a step of a + b * sequences + c * context tokens."""
    columns = np.array([[1.0, each.sequences, each.context_tokens] for each in windows]).reshape(len(windows), 3)
    step_ms = np.array([1e3 * each.seconds / each.steps for each in windows])
    steps = np.array([each.steps for each in windows])
    names = ("decode_a_ms", "decode_b_ms_per_seq", "decode_c_ms_per_context_token")
    return _linear(names, columns, step_ms, steps, "decode batches of other sizes and prompts")


def _prefill(prefills: Sequence[Prefill], chunk_tokens: int, quadratic_prior: float) -> tuple[dict[str, Figure], float]:
    """Base (paid for each chunk), linear and quadratic part; the last only with a prior, or where it is more than noise."""
    tokens = np.array([float(each.tokens) for each in prefills])
    chunks = np.ceil(tokens / chunk_tokens) if chunk_tokens else np.ones_like(tokens)
    columns = np.stack([chunks, tokens, tokens * tokens], axis=1) if len(prefills) else np.zeros((0, 3))
    prefill_ms = np.array([1e3 * each.seconds for each in prefills])
    names = ("prefill_base_ms", "prefill_ms_per_token", "prefill_ms_per_token_squared")
    weights, what = np.ones_like(tokens), "prefills of other lengths"
    if len(set(tokens)) > 3:
        found, error = _linear(names, columns, prefill_ms, weights, what, last_prior=quadratic_prior)
        if quadratic_prior or (found[names[2]].low or 0.0) > 0.0:
            return found, error
    found, error = _linear(names[:2], columns[:, :2], prefill_ms, weights, what)
    return {**found, names[2]: Figure(value=0.0)}, error


def _linear(
    names: Sequence[str], columns: Floats, durations_ms: Floats, weights: Floats, what: str, last_prior: float = 0.0
) -> tuple[dict[str, Figure], float]:
    """Coefficients >= 0 of the columns, and the root mean square of the relative residuals. `weights`: how many independent steps an
    observation is the mean of. `last_prior` > 0: of the last coefficient."""
    if len(durations_ms) <= len(names) or np.linalg.matrix_rank(columns / np.maximum(columns.max(axis=0), 1e-300)) < len(names):
        raise ValueError(f"too few measurements: {what} are needed")
    # In units in which all coefficients are of one size.
    units = np.median(durations_ms) / columns.max(axis=0)

    def relative(coefficients: Floats) -> Floats:
        found: Floats = (columns @ (coefficients * units) - durations_ms) / durations_ms
        return found

    def residuals(coefficients: Floats) -> Floats:
        found: Floats = relative(coefficients) * np.sqrt(weights)
        return np.append(found, PRIOR_RESIDUAL * (coefficients[-1] * units[-1] / last_prior - 1.0)) if last_prior else found

    solved = least_squares(residuals, np.full(len(names), 0.5), bounds=(0.0, np.inf), loss="soft_l1", f_scale=OUTLIER)
    freedom = len(durations_ms) - len(names)
    variance = float(np.sum(np.minimum(np.square(residuals(solved.x)), OUTLIER**2))) / freedom
    spread = stdtrit(freedom, 0.5 + CONFIDENCE / 2.0) * np.sqrt(variance * np.diag(np.linalg.pinv(solved.jac.T @ solved.jac)))
    figures = {
        name: Figure(value=float(value * unit), low=float(max(0.0, value - wide) * unit), high=float((value + wide) * unit))
        for name, value, wide, unit in zip(names, solved.x, spread, units, strict=True)
    }
    return figures, float(np.sqrt(np.mean(np.square(relative(solved.x)))))


def _mean(seconds: Sequence[float]) -> Figure | None:
    """Mean of a few repeats: one alone has no interval."""
    if not seconds:
        return None
    if len(seconds) == 1:
        return Figure(value=seconds[0])
    wide = float(stdtrit(len(seconds) - 1, 0.5 + CONFIDENCE / 2.0)) * stdev(seconds) / math.sqrt(len(seconds))
    middle = fmean(seconds)
    return Figure(value=middle, low=max(0.0, middle - wide), high=middle + wide)


def _transfer(transfers: Sequence[KvTransfer]) -> list[tuple[str, Figure]]:
    """Base cost of a transfer and cost of one more token; one figure if sizes do not differ."""
    if not transfers:
        return []
    tokens = np.array([float(each.tokens) for each in transfers])
    columns = np.stack([np.ones_like(tokens), tokens], axis=1)
    durations_ms = np.array([1e3 * each.seconds for each in transfers])
    try:
        found, _ = _linear(("base", "token"), columns, durations_ms, np.ones_like(tokens), "transfers of other sizes")
    except ValueError:
        each = Figure(value=1e6 * median(each.seconds / each.tokens for each in transfers))
        return [("kv_swap_base_ms", Figure(value=0.0)), ("kv_swap_us_per_token", each)]
    return [("kv_swap_base_ms", found["base"]), ("kv_swap_us_per_token", found["token"].scaled(1e3))]


def _recompute(measured: Measurements, prefill: dict[str, Figure]) -> Figure | None:
    """Microseconds for each token of prompt + produced, from repeated attempts; else from prefills."""
    again = [each for each in measured.prefills if each.resumed]
    if not again:
        return prefill["prefill_ms_per_token"].scaled(1e3)
    chunk = measured.prefill_chunk_tokens
    base_ms = prefill["prefill_base_ms"].value
    each_us = [1e3 * (1e3 * one.seconds - base_ms * (math.ceil(one.tokens / chunk) if chunk else 1)) / one.tokens for one in again]
    return _mean([max(0.0, each) for each in each_us])
