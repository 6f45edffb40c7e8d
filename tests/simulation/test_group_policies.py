"""Storms under everything that makes other groups than the defaults do: learned classes, mega prompts, limited and weighty tenants."""

from __future__ import annotations

from collections import Counter

import pytest

from qlm_planner import classes
from qlm_planner.policy import Policy, TokenClasses
from qlm_planner.tenants import Tenant, Tenants
from qlm_sim.many_seeds import failure_text
from qlm_sim.seed_run import run_seed

POLICY = Policy(
    token_classes=TokenClasses.KMEANS,
    relearn_every_s=2.0,
    mega_fraction=0.01,
    tenants=Tenants(others=Tenant(weight=2.0, share_max=0.3)),
    share_window_s=5.0,
)


def test_every_invariant_holds_however_groups_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "SAMPLES_MIN", 5)  # a storm has few requests
    happened: Counter[str] = Counter()
    for seed in range(1, 8):
        report = run_seed(seed, policy=POLICY)
        assert not report.problem, failure_text(report)
        happened += report.effects
    assert happened["LearnClasses"] > 10
    assert happened["PlanApplied ranked"] > 0
