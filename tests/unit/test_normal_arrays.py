"""Arrays of normals agree with `Normal` on each (`test_distribution_normal` holds `floored` against integrals)."""

from __future__ import annotations

import numpy as np

from qlm_core.statistics.normal_arrays import density, floored


def test_shapes_are_kept() -> None:
    z = np.array([[0.0, -30.0], [30.0, 1.0]])
    assert density(z).shape == (2, 2)
    mean, variance = floored(z, np.ones((2, 2)))
    assert mean.shape == variance.shape == (2, 2)
