"""Clusters in storms, by seed: the invariants hold, everything ends, and the faults met what they are for."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from qlm_sim.coverage import COMMON, EFFECTS, missing
from qlm_sim.many_seeds import failure_text, met
from qlm_sim.seed_run import SeedReport, run_seed
from qlm_sim.weather import Fault

SEEDS = range(1, 51)
FIXED_BUGS: tuple[int, ...] = ()
"""Seeds beyond those that found a bug once, with what it was."""


@cache
def report_of(seed: int) -> SeedReport:
    return run_seed(seed)


@pytest.mark.parametrize("seed", [*SEEDS, *FIXED_BUGS])
def test_every_invariant_holds(seed: int) -> None:
    report = report_of(seed)
    assert not report.problem, failure_text(report)
    assert report.states.total() > 0


def test_every_kind_of_fault_met_the_work_that_it_is_for() -> None:
    reports = [report_of(seed) for seed in SEEDS]
    assert not missing(met(reports), COMMON)


def test_every_operation_happened() -> None:
    effects = sum((report_of(seed).effects for seed in SEEDS), Counter[str]())
    assert not [name for name in EFFECTS if not effects[name]]


def test_requests_ended_in_every_way_and_old_leases_were_tried() -> None:
    reports = [report_of(seed) for seed in SEEDS]
    states = sum((report.states for report in reports), Counter[str]())
    assert {"COMPLETED", "CANCELLED", "EXPIRED", "FAILED", "refused"} <= set(states)
    assert states["COMPLETED"] > 0.7 * states.total()
    assert sum(report.stale_calls for report in reports) > 100


def test_each_run_leaves_some_kinds_of_fault_off() -> None:
    kinds = [report_of(seed).weather.kinds for seed in SEEDS]
    assert all(len(each) < len(Fault) for each in kinds)
    assert len({len(each) for each in kinds}) > 5
