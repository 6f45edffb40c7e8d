"""Comparison policies and fallbacks in storms: whatever decides, the invariants hold and everything ends."""

from __future__ import annotations

import pytest

from qlm_core.overload import Overload
from qlm_planner.policy import Order, Policy
from qlm_sim.storms.seed_run import failure_text, run_seed

OTHERS = [order for order in Order if order is not Order.SLO]


@pytest.mark.parametrize("seed", [14])
@pytest.mark.parametrize("order", OTHERS)
def test_every_invariant_holds_under_every_policy(order: Order, seed: int) -> None:
    report = run_seed(seed, policy=Policy(order=order))
    assert not report.problem, failure_text(report)
    assert report.states["COMPLETED"] > 0


@pytest.mark.parametrize("seed", [5])
@pytest.mark.parametrize("overload", [each for each in Overload if each is not Overload.BEST_EFFORT])
def test_every_invariant_holds_under_every_fallback(overload: Overload, seed: int) -> None:
    report = run_seed(seed, policy=Policy(overload=overload))
    assert not report.problem, failure_text(report)
