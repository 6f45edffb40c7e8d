"""The distribution function of a gamma variable, without SciPy: its import would be a third of the start of a gateway."""

from __future__ import annotations

import math

import numpy as np

from qlm_core.normal_arrays import Floats, below

SHAPE_MAX = 1_000.0
"""Beyond it the cube root is as good as normal (Wilson and Hilferty): to within 0.0001."""
TERMS_MAX = 1_000
RELATIVE = 1e-12
TINY = 1e-300


def gamma_below(shape: float, values: Floats) -> Floats:
    """P(X < x) of a gamma variable with scale 1: the regularised lower incomplete gamma function, for a shape > 0 and values >= 0. A series
    below the mean, Lentz's continued fraction above it (Press et al., Numerical Recipes, section 6.2)."""
    values = np.asarray(values, dtype=np.float64)
    if shape > SHAPE_MAX:
        return below((np.cbrt(values / shape) - 1.0 + 1.0 / (9.0 * shape)) * 3.0 * math.sqrt(shape))
    found = np.zeros_like(values)
    small = (values > 0.0) & (values < shape + 1.0)
    large = values >= shape + 1.0
    found[small] = _series(shape, values[small])
    found[large] = 1.0 - _fraction(shape, values[large])
    return np.clip(found, 0.0, 1.0)


def _scale(shape: float, values: Floats) -> Floats:
    return np.exp(shape * np.log(values) - values - math.lgamma(shape))


def _series(shape: float, values: Floats) -> Floats:
    term = np.full_like(values, 1.0 / shape)
    total = term.copy()
    for number in range(1, TERMS_MAX):
        term *= values / (shape + number)
        total += term
        if (term <= RELATIVE * total).all():
            break
    return total * _scale(shape, values)


def _fraction(shape: float, values: Floats) -> Floats:
    first = values + 1.0 - shape
    upper = np.full_like(values, 1.0 / TINY)
    lower = 1.0 / first
    total = lower.copy()
    for number in range(1, TERMS_MAX):
        weight = -number * (number - shape)
        first = first + 2.0
        lower = 1.0 / _not_zero(weight * lower + first)
        upper = _not_zero(first + weight / upper)
        step = upper * lower
        total *= step
        if (np.abs(step - 1.0) <= RELATIVE).all():
            break
    return total * _scale(shape, values)


def _not_zero(values: Floats) -> Floats:
    return np.where(np.abs(values) < TINY, TINY, values)
