"""The share of requests that are late, by which groups are shed."""

from __future__ import annotations

import math

import pytest

from qlm_planner.late_share import late_share


@pytest.mark.parametrize(
    ("begin_s", "end_s", "deviation_s", "due_s", "share"),
    [
        (0, 10, 0, 5, 0.5),
        (0, 10, 0, 20, 0),
        (5, 5, 0, 4, 1),
        (5, 5, 0, 6, 0),
        (0, 10, 1e-4, 2.5, 0.75),
        (3, 3, 1, 3, 0.5),
        (0, 1, 1, math.inf, 0),
    ],
)
def test_the_share_that_is_late(begin_s: float, end_s: float, deviation_s: float, due_s: float, share: float) -> None:
    assert late_share(begin_s, end_s, deviation_s, due_s) == pytest.approx(share, abs=1e-3)
