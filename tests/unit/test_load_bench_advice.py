"""The check of the planner's advice: its scenarios vary and repeat, and errors are counted as the target has them."""

from __future__ import annotations

import pytest
from benchmarks.planner.advice_error import CASES, Case, fleet_advised, summary
from benchmarks.planner.advice_scenarios import ASK_S, HORIZON_S, scenarios


def case(advised: int, fewest: int) -> Case:
    return Case(seed=1, gpu="A10", models=1, requests=100, instances=1, advised=advised, fewest=fewest)


def test_scenarios_are_the_same_again_and_differ_from_each_other() -> None:
    found = scenarios(CASES)
    assert found == scenarios(CASES)
    assert CASES >= 20
    assert len({each.gpu for each in found}) >= 2
    assert len({len(each.models) for each in found}) >= 2
    assert len({each.instances for each in found}) >= 3
    assert len({stream.slo.seconds for each in found for stream in each.streams}) >= 4
    requests = found[0].requests()
    assert requests == found[0].requests()
    assert 0.0 < requests[0].arrival_s <= requests[-1].arrival_s < ASK_S + HORIZON_S


def test_one_instance_too_many_or_too_few_counts_as_right() -> None:
    found = summary([case(3, 3), case(2, 3), case(4, 3), case(1, 3)])
    assert found.within_one == pytest.approx(0.75)
    assert found.exact == pytest.approx(0.25)


def test_advice_is_requested_in_the_middle_of_a_simulated_load() -> None:
    small = min(scenarios(CASES), key=lambda each: len(each.requests()))
    assert 1 <= fleet_advised(small) <= 4
