"""The order of engine policies on real vLLM against the simulated engine: the load and the judgement, without vLLM."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.agent.engine_policies import GAP_STEPS, POLICIES, REQUESTS, Outcome, Steps, concordance, load_of, simulate

STEPS = Steps(one_s=0.02, full_s=0.025, prompt_token_s=0.0002)


def test_the_load_has_its_rate_and_both_kinds_of_deadlines() -> None:
    load = load_of(20_000, 1)
    assert np.diff(load.arrived).mean() == pytest.approx(GAP_STEPS, rel=0.1)
    patience = np.array(load.deadlines) - np.array(load.arrived)
    assert sorted(set(patience.round())) == [100.0, 2_000.0]
    assert load_of(REQUESTS, 1) == load_of(REQUESTS, 1) != load_of(REQUESTS, 2)


def test_each_policy_is_the_best_in_its_own_figure() -> None:
    found = {name: simulate(load_of(REQUESTS, 2), STEPS, name) for name in POLICIES}
    assert min(found, key=lambda name: found[name].token) == "fastserve"
    assert min(found, key=lambda name: found[name].late) == "edf"
    assert found["larry"].first_p50 < 0.9 * found["fcfs"].first_p50


def test_a_slower_machine_has_the_same_outcome_in_steps() -> None:
    slower = Steps(one_s=0.2, full_s=0.25, prompt_token_s=0.002)
    for name in ("fcfs", "edf", "larry"):
        assert simulate(load_of(REQUESTS, 1), slower, name).token == pytest.approx(
            simulate(load_of(REQUESTS, 1), STEPS, name).token, rel=0.02
        )


def test_concordance_counts_pairs_that_are_apart() -> None:
    def outcome(token: float) -> Outcome:
        return Outcome(token=token, first_p50=1.0, late=0.0)

    assert concordance([(outcome(1.0), outcome(10.0)), (outcome(2.0), outcome(20.0))]) == 1.0
    assert concordance([(outcome(2.0), outcome(10.0)), (outcome(1.0), outcome(20.0))]) == 0.0
    assert concordance([(outcome(1.0), outcome(10.0)), (outcome(2.0), outcome(20.0)), (outcome(0.5), outcome(19.9))]) == 0.5
