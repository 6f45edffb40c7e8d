"""`Normal` against sampling-free references: scipy's own distribution and numerical integrals, and the algebra that formulas rely on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri

from qlm_core.statistics.distribution import Normal

means = st.floats(-1e6, 1e6)
variances = st.floats(1e-6, 1e9)
normals = st.builds(Normal, means, variances)
any_normals = st.builds(Normal, means, st.just(0.0) | variances)


@pytest.mark.parametrize(("mean", "variance"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf), (1.0, -1e-9)])
def test_refuses_what_is_no_distribution(mean: float, variance: float) -> None:
    with pytest.raises(ValueError, match=r"normal|variance"):
        Normal(mean, variance)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, 1.1, math.nan])
def test_refuses_what_is_no_probability(probability: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        Normal(1.0, 1.0).quantile(probability)


def test_refuses_comparisons_with_nan() -> None:
    for call in (Normal(1.0, 1.0).probability_above, Normal(1.0, 1.0).floored, Normal(1.0, 1.0).capped):
        with pytest.raises(ValueError):  # noqa: PT011 (three messages)
            call(math.nan)


@given(normals, st.floats(0.001, 0.999))
def test_quantile_and_tail_agree_with_scipy(x: Normal, probability: float) -> None:
    value = x.quantile(probability)
    assert value == pytest.approx(x.mean + x.deviation * ndtri(probability), rel=1e-9, abs=1e-6)
    assert x.probability_above(value) == pytest.approx(1.0 - probability, abs=1e-6)


@given(any_normals, any_normals)
def test_sums_add_means_and_variances(x: Normal, y: Normal) -> None:
    assert x + y == y + x
    assert (x + y).mean == x.mean + y.mean
    assert (x + y).variance == x.variance + y.variance


@given(any_normals, st.integers(1, 50))
def test_scaled_is_no_sum_of_independent_draws(x: Normal, count: int) -> None:
    assert x.scaled(count).mean == pytest.approx(count * x.mean)
    assert x.scaled(count).deviation == pytest.approx(count * x.deviation)


@given(normals, st.floats(-4.0, 4.0))
def test_floored_and_capped_have_the_moments_of_the_clipped_variable(x: Normal, z: float) -> None:
    bound = x.mean + z * x.deviation
    grid = x.mean + x.deviation * np.linspace(-9.0, 9.0, 20_001)
    weights = np.exp(-0.5 * ((grid - x.mean) / x.deviation) ** 2)
    weights /= weights.sum()
    for clipped, values in ((x.floored(bound), np.maximum(grid, bound)), (x.capped(bound), np.minimum(grid, bound))):
        mean = float((weights * values).sum())
        variance = float((weights * (values - mean) ** 2).sum())
        assert clipped.mean == pytest.approx(mean, abs=2e-3 * x.deviation + 1e-9)
        assert clipped.variance == pytest.approx(variance, abs=2e-3 * x.variance + 1e-9)
