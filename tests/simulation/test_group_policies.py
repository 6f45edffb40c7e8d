"""Storms under everything that makes other groups than the defaults do: limited and weighty tenants."""

from __future__ import annotations

from collections import Counter

from qlm_planner.board.tenants import Tenant, Tenants
from qlm_planner.policy import Policy
from qlm_sim.storms.seed_run import failure_text, run_seed

POLICY = Policy(
    tenants=Tenants(others=Tenant(weight=2.0, share_max=0.3)),
    share_window_s=5.0,
)


def test_every_invariant_holds_however_groups_are_made() -> None:
    happened: Counter[str] = Counter()
    for seed in range(1, 8):
        report = run_seed(seed, policy=POLICY)
        assert not report.problem, failure_text(report)
        happened += report.effects
    assert happened["PlanApplied ranked"] > 0
