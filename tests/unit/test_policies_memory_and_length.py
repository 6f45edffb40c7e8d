"""LARRY and the engine policies that it is measured against, claim by claim (Kossmann et al., 2024)."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_agent.decisions.events import PulledRun
from qlm_agent.decisions.expectations import Expectations
from qlm_agent.engines.policies.memory import BLOCK_TOKENS, Larry, NoPreempt
from qlm_agent.engines.policies.port import MEDIAN, QUANTILE_LEVELS, EnginePolicy, Residence, Sequences, SequenceView
from qlm_agent.engines.policies.registry import FirstComeFirstServed
from qlm_agent.engines.policies.remaining import LearningToRank, Trail, TrailPlus

NOW_S = 100.0


def view(number: int, prompt: int = 160, *, waited_s: float = 0.0, produced: int = 0, **facts: object) -> SequenceView:
    return SequenceView(
        run_id=str(number),
        arrival=number,
        deadline_s=float("inf"),
        priority=0,
        prompt_tokens=prompt,
        produced_tokens=produced,
        arrived_s=NOW_S - waited_s,
        **facts,  # type: ignore[arg-type]
    )


def predicted(number: int, tokens: float, *, produced: int = 0, true: int = 0) -> SequenceView:
    """A run whose length is predicted to within a half."""
    quantiles = tuple(tokens * factor for factor in (0.5, 0.75, 1.0, 1.25, 1.5))
    return view(number, produced=produced, quantiles=quantiles, true_tokens=true, residence=Residence.GPU if produced else Residence.NONE)


def order(policy: EnginePolicy, *waiting: SequenceView, running: tuple[SequenceView, ...] = ()) -> list[str]:
    return list(policy.order(NOW_S, Sequences(waiting), Sequences(running)))


# LARRY, section 4.1 ---------------------------------------------------------------------------------------------------


def test_the_longest_waiting_of_equal_prompts_is_first() -> None:
    assert order(Larry(), view(1, waited_s=1.0), view(2, waited_s=3.0), view(3, waited_s=2.0)) == ["2", "3", "1"]


def test_the_smallest_prompt_of_equal_waits_is_first() -> None:
    assert order(Larry(), view(1, 1600), view(2, 160), view(3, 800)) == ["2", "3", "1"]


def test_a_large_prompt_is_overtaken_only_under_a_long_queue() -> None:
    """It is 90 blocks larger and waited 50 s longer: at a weight of 10 that is 500 points against 90 for each waiting run."""
    large, small = view(1, 1600, waited_s=50.0), view(2, 160)
    assert order(Larry(weight=10.0), large, small) == ["1", "2"]
    crowd = [view(number, 160) for number in range(3, 20)]
    assert order(Larry(weight=10.0), large, small, *crowd)[-1] == "1"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8_192), st.floats(0.0, 100.0)), min_size=2, max_size=40), st.floats(0.01, 5_000.0))
def test_nobody_is_overtaken_for_longer_than_the_bound(runs: list[tuple[int, float]], weight: float) -> None:
    """Blocks more x waiting runs / weight seconds: no run starves, and the bound falls with the weight."""
    waiting = [view(number, prompt, waited_s=waited_s) for number, (prompt, waited_s) in enumerate(runs)]
    place = {run_id: at for at, run_id in enumerate(order(Larry(weight=weight), *waiting))}
    assert sorted(place.values()) == list(range(len(runs)))
    for early in waiting:
        for late in waiting:
            if place[late.run_id] < place[early.run_id]:
                blocks = -(-early.prompt_tokens // BLOCK_TOKENS) + (late.prompt_tokens // -BLOCK_TOKENS)
                assert late.arrived_s - early.arrived_s <= blocks * len(runs) / weight + 1e-6


def test_a_weight_above_1000_is_first_come_first_served() -> None:
    """For prompts of a chat and arrivals that are a third of a second apart. A weight of 1 is far from it."""
    draws = random.Random(5)
    waiting = [view(number, draws.randrange(100, 600), waited_s=10.0 - number / 3) for number in range(10)]
    assert order(Larry(weight=1001.0), *waiting) == order(FirstComeFirstServed(), *waiting)
    assert order(Larry(weight=1.0), *waiting) != order(FirstComeFirstServed(), *waiting)


def test_larry_orders_again_while_runs_wait() -> None:
    larry = Larry()
    order(larry, view(1), view(2))
    assert larry.next_wakeup_s(NOW_S) == pytest.approx(NOW_S + 0.1)
    order(larry, view(1))
    assert larry.next_wakeup_s(NOW_S) is None


# No-Preempt, section 2.2 ----------------------------------------------------------------------------------------------


@dataclass
class Engine:
    kv_capacity_tokens: int


def no_preempt(kv_tokens: int, context_tokens: int = 1_024) -> NoPreempt:
    policy = NoPreempt(context_tokens=context_tokens)
    policy.reset(Engine(kv_tokens))  # type: ignore[arg-type]
    return policy


def test_worst_case_kv_is_reserved() -> None:
    policy = no_preempt(4 * 1_024)
    assert order(policy, *(view(number) for number in range(6))) == ["0", "1", "2", "3"], "each may grow to the context of 1,024"
    assert order(policy, *(view(number, max_tokens=352) for number in range(9))) == [str(number) for number in range(8)], "160 + 352"
    assert order(policy, view(9), running=(view(1, produced=5), view(2), view(3))) == ["9"]
    assert order(policy, view(9), running=(view(1, produced=5), view(2), view(3), view(4))) == []


def test_the_first_without_room_holds_back_those_behind_it() -> None:
    assert order(no_preempt(1_600), view(1, max_tokens=352), view(2), view(3, max_tokens=32), running=(view(0, max_tokens=352),)) == ["1"]


def test_a_run_beyond_the_engine_runs_alone() -> None:
    policy = no_preempt(512)
    assert order(policy, view(1), view(2)) == ["1"]
    assert order(policy, view(2), running=(view(1, produced=1),)) == []


# TRAIL, TRAIL+ and LTR ------------------------------------------------------------------------------------------------


def preempted(policy: EnginePolicy, first: SequenceView, *running: SequenceView) -> list[str]:
    return list(policy.preempt(NOW_S, Sequences([first]), Sequences(running)))


def test_trail_admits_the_fewest_predicted_remaining_tokens_first() -> None:
    assert order(Trail(), predicted(1, 300), predicted(2, 100), predicted(3, 350, produced=300), view(4)) == ["3", "2", "1", "4"]


def test_trail_preempts_only_below_c_of_the_prediction() -> None:
    running = (predicted(1, 400, produced=100), predicted(2, 400, produced=340), predicted(3, 1_000, produced=10))
    assert preempted(Trail(c=0.8), predicted(9, 50), *running) == ["3", "1"], "the second one has made 85%"
    assert preempted(Trail(c=0.2), predicted(9, 50), *running) == ["3"]
    assert preempted(Trail(c=0.8), predicted(9, 500), *running) == ["3"], "the others have less left"
    assert preempted(Trail(c=0.0), predicted(9, 1), *running) == []


def test_a_run_beyond_its_prediction_is_predicted_anew() -> None:
    """400 of 400 predicted: up to the next quantile of 500; beyond the last one, 600, half of its tokens."""
    policy = Trail()
    left = policy.remaining(Sequences([predicted(1, 400, produced=made) for made in (100, 400, 550, 700)]))
    assert left.tolist() == [300.0, 100.0, 50.0, 350.0]


def test_trail_plus_knows_true_lengths_and_preempts_nobody() -> None:
    policy = TrailPlus()
    assert policy.oracle
    short, long = predicted(1, 900, true=20), predicted(2, 30, true=800)
    assert order(policy, long, short) == ["1", "2"]
    assert preempted(policy, short, predicted(3, 900, produced=1, true=900)) == []
    assert list(policy.victims(NOW_S, Sequences([short, long]))) == ["2", "1"]


def test_ltr_ranks_by_the_prediction_at_arrival() -> None:
    assert order(LearningToRank(), predicted(1, 400, produced=390), predicted(2, 300), predicted(3, 500)) == ["2", "1", "3"]
    assert preempted(LearningToRank(), predicted(9, 1), predicted(1, 400, produced=1)) == []


@pytest.mark.parametrize("policy", [Larry(), no_preempt(10**6), Trail(), TrailPlus(), LearningToRank()])
def test_nothing_waits_and_nothing_runs(policy: EnginePolicy) -> None:
    assert order(policy) == []
    assert list(policy.victims(NOW_S, Sequences([]))) == []


@pytest.mark.parametrize("wrong", [lambda: Larry(weight=-1.0), lambda: NoPreempt(context_tokens=0), lambda: Trail(c=1.5)])
def test_options_are_checked(wrong: object) -> None:
    with pytest.raises(ValueError, match="is"):
        wrong()  # type: ignore[operator]


# Predictions ----------------------------------------------------------------------------------------------------------


def pulled(predicted_tokens: int = 0, output_tokens_max: int = 10_000) -> PulledRun:
    return PulledRun(
        run_id="1",
        queue_id="1-0",
        model="m",
        prompt_tokens=10,
        output_tokens_max=output_tokens_max,
        stored=0,
        predicted_tokens=predicted_tokens,
    )


def test_runs_bring_qlms_own_prediction() -> None:
    """The quantiles of the class; around the length model's prediction where it is in use; never beyond the request's limit."""
    expectations = Expectations({})
    of_class = expectations.length_quantiles(pulled())
    curve = expectations.outputs("m", "")
    assert of_class == pytest.approx([curve.quantile(level) for level in QUANTILE_LEVELS], rel=0.01)
    assert expectations.length_quantiles(pulled(predicted_tokens=40))[MEDIAN] == pytest.approx(40.0)
    assert expectations.length_quantiles(pulled(predicted_tokens=40))[0] == pytest.approx(40.0 * of_class[0] / of_class[MEDIAN])
    assert max(expectations.length_quantiles(pulled(output_tokens_max=5))) == 5.0
