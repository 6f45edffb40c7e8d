"""Arrays of normals say what `Normal` says of each (`test_distribution_normal` holds `floored` against integrals)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.distribution import Normal
from qlm_core.normal_arrays import beyond, density, floored

normals = st.builds(Normal, st.floats(-1e4, 1e4), st.one_of(st.just(0.0), st.floats(1e-9, 1e7)))


@given(st.lists(st.tuples(normals, st.one_of(st.just(math.inf), st.floats(-1e4, 1e4))), min_size=1, max_size=20))
def test_beyond_as_one_by_one(each: list[tuple[Normal, float]]) -> None:
    means, variances = np.array([one.mean for one, _ in each]), np.array([one.variance for one, _ in each])
    above, excess = beyond(means, variances, np.array([value for _, value in each]))
    for at, (one, value) in enumerate(each):
        assert above[at] == pytest.approx(one.probability_above(value), abs=1e-14)
        expected = one.shifted(-value).floored(0.0).mean if value < math.inf else 0.0
        assert excess[at] == pytest.approx(expected, rel=1e-9, abs=1e-12 + 1e-13 * one.deviation)


def test_shapes_are_kept() -> None:
    z = np.array([[0.0, -30.0], [30.0, 1.0]])
    assert density(z).shape == (2, 2)
    mean, variance = floored(z, np.ones((2, 2)))
    assert mean.shape == variance.shape == (2, 2)
