"""The gamma distribution without SciPy, held against SciPy's; and the longest of so many outputs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gammainc

from qlm_core.incomplete_gamma import SHAPE_MAX, gamma_below
from qlm_core.length_curve import LONGEST_OF, curve_of_moments, longest_among


@given(st.floats(0.01, 1e6), st.lists(st.floats(0.0, 5.0), min_size=1, max_size=30))
def test_as_scipy_has_it(shape: float, parts: list[float]) -> None:
    values = np.array(parts) * shape
    assert gamma_below(shape, values) == pytest.approx(gammainc(shape, values), abs=1e-9 if shape <= SHAPE_MAX else 1e-4)


def test_the_ends() -> None:
    assert gamma_below(2.0, np.array([0.0, 1e9])).tolist() == [0.0, 1.0]


def test_the_longest_of_so_many_against_draws() -> None:
    curve, chance = curve_of_moments(200.0, 150.0**2), random.Random(3)
    table = curve.longest()
    for count in (1, 8, 64, 512):
        shape = (200.0 / 150.0) ** 2
        drawn = [max(chance.gammavariate(shape, 200.0 / shape) for _ in range(count)) for _ in range(400)]
        assert table[LONGEST_OF.index(count)] == pytest.approx(sum(drawn) / len(drawn), rel=0.1)


def test_between_the_counts() -> None:
    table = [float(count) for count in range(len(LONGEST_OF))]
    assert [longest_among(table, count) for count in (0.0, 1.0, 3.0, 2_048.0, 1e9)] == pytest.approx(
        [0.0, 0.0, 1.585, 11.0, 11.0], abs=1e-3
    )
