"""Engine models of the simulated engine: how prompts share steps, and pipelines of stages (FastServe, section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_agent.config import AgentSettings, simulated_limits
from qlm_agent.engines.policies.registry import ENGINE_POLICIES, engine_policy
from qlm_agent.engines.simulated.batching.batch import SimulatedBatch
from qlm_agent.engines.simulated.batching.kv_blocks import BLOCK_TOKENS
from qlm_agent.engines.simulated.batching.prefills import PrefillRule
from qlm_agent.engines.simulated.batching.sequences import Progress
from qlm_agent.engines.simulated.batching.stages import Stages
from qlm_agent.engines.simulated.pipeline import PipelinedBatches
from qlm_core.vocabulary.errors import ConfigError
from simulated_steps import Steps, make, run, spans_of


def pipeline(count: int, *, kv: int = 10_000, batch_max: int = 4, policy: str = "fcfs", step_s: float = 1.0) -> PipelinedBatches:
    stages = Stages(count)
    return PipelinedBatches(
        stages,
        lambda number: SimulatedBatch(
            step_s=Steps(step_s),
            kv_capacity_tokens=kv // count,
            batch_max=batch_max,
            prefill_chunk_tokens=1_000,
            policy=engine_policy(policy, {}),
            host_kv_tokens=kv,
            stages=stages,
        ),
    )


def ends_of(progress: Sequence[Progress]) -> dict[str, float]:
    return {each.run_id: each.last_s for each in progress if each.done}


# Prefills -------------------------------------------------------------------------------------------------------------


def test_shared_budget_is_less_one_token_of_each_decode() -> None:
    steps = Steps()
    batch = make(steps, chunk=100, prefill=PrefillRule.SHARED)
    for name in "12":
        batch.add(0.0, run(name, 10, 20))
    batch.advance(1.0)
    batch.add(1.0, run("3", 250, 2))
    batch.advance(4.5)
    assert [step[2] for step in steps.calls[2:5]] == [[(0, 98)], [(98, 98)], [(196, 54)]]


def test_a_shared_budget_below_the_seats_still_lets_prefills_advance() -> None:
    batch = make(chunk=1, batch_max=4, prefill=PrefillRule.SHARED)
    for name in "1234":
        batch.add(0.0, run(name, 30, 40))
    batch.advance(500.0)
    assert len(ends_of(batch.news())) == 4


def test_whole_prompts_are_not_cut_and_join_only_where_all_fit() -> None:
    steps = Steps()
    batch = make(steps, chunk=100, prefill=PrefillRule.WHOLE)
    for name, prompt in {"1": 60, "2": 50, "3": 30, "4": 500}.items():
        batch.add(0.0, run(name, prompt, 9))
    batch.advance(3.5)
    assert [step[2] for step in steps.calls[:3]] == [[(0, 60)], [(0, 50), (0, 30)], [(0, 500)]]


# Stages ---------------------------------------------------------------------------------------------------------------


def test_a_token_takes_all_stages_and_the_next_batch_enters_behind_the_first_stage() -> None:
    batches = pipeline(2)
    batches.add(0.0, run("1", 10, 3))
    batches.add(0.0, run("2", 10, 3))
    batches.advance(1.5)
    assert batches.running == 2, "the second entered at 1.0"
    batches.advance(1_000.0)
    assert ends_of(batches.news()) == {"1": 6.0, "2": 7.0}


def test_full_stages_make_a_token_of_some_batch_in_each_stage_time() -> None:
    batches = pipeline(4, batch_max=1)
    for name in "1234":
        batches.add(0.0, run(name, 10, 50))
    batches.advance(10_000.0)
    assert max(ends_of(batches.news()).values()) == 3 + 4 * 50


def test_behind_a_slower_batch_one_waits_in_every_stage() -> None:
    stages = Stages(3)
    assert stages.carry(0.0, 10.0) == 30.0
    assert stages.carry(10.0, 1.0) == 31.0, "it waits for the slow one before each stage"
    assert stages.free_at_s == 11.0
    assert stages.carry(100.0, 1.0) == 103.0


def test_later_stages_repeat_the_copies_of_the_first() -> None:
    """A step that waits for KV does so in every stage."""

    def served(swap_s: float) -> tuple[float, float]:
        batch = SimulatedBatch(
            step_s=Steps(),
            kv_capacity_tokens=6 * BLOCK_TOKENS,
            batch_max=1,
            prefill_chunk_tokens=1_000,
            policy=engine_policy("fastserve", {"kv": "reactive", "quantum_s": 3.0, "promote_s": 1e6}),
            kv_swap_s=lambda tokens: swap_s,
            host_kv_tokens=1_000,
            stages=Stages(3),
        )
        for name in "12":
            batch.add(0.0, run(name, 4 * BLOCK_TOKENS, 5))
        batch.advance(1_000.0)
        return max(ends_of(batch.news()).values()), batch.kv_stalled_s

    (end_s, stalled_s), (free_end_s, _) = served(0.01), served(0.0)
    assert stalled_s > 0.02
    assert end_s - free_end_s == pytest.approx(3 * stalled_s)


def test_a_batch_has_its_share_of_the_kv() -> None:
    batches = pipeline(2, kv=8 * BLOCK_TOKENS)
    for name, prompt in {"1": 60, "2": 70, "3": 60, "4": 30}.items():
        batches.add(0.0, run(name, prompt, 2))
    (failed,) = batches.news()
    assert failed.run_id == "2"
    assert failed.failure is not None
    batches.advance(1.5)
    assert (batches.running, batches.waiting, batches.kv_used_tokens) == (2, 1, 8 * BLOCK_TOKENS)


def test_a_pause_of_the_engine_delays_all_stages() -> None:
    paused, plain = pipeline(2), pipeline(2)
    for batches in (paused, plain):
        for name in "12":
            batches.add(0.0, run(name, 10, 5))
        batches.advance(2.5)
    paused.skip_time(2.5, 12.5)
    for batches in (paused, plain):
        batches.advance(1_000.0)
    assert ends_of(paused.news()) == {name: end_s + 10.0 for name, end_s in ends_of(plain.news()).items()}


@settings(deadline=None)
@given(
    jobs=st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=25),
    count=st.integers(2, 4),
    policy=st.sampled_from(sorted(ENGINE_POLICIES)),
    aborted=st.integers(0, 30),
)
def test_every_run_ends_whatever_the_policy_and_all_kv_is_given_back(
    jobs: list[tuple[float, int, int]], count: int, policy: str, aborted: int
) -> None:
    batches = pipeline(count, kv=10 * count * BLOCK_TOKENS, batch_max=3, policy=policy, step_s=0.1)
    ended: set[str] = set()
    for number, (at_s, prompt, target) in enumerate(sorted(jobs), 1):
        batches.advance(at_s)
        batches.add(at_s, run(str(number), prompt, target))
        if number == aborted:
            batches.abort(str(number))
            ended.add(str(number))
    batches.advance(10_000.0)
    ended |= set(ends_of(batches.news()))
    assert ended == {str(number) for number in range(1, len(jobs) + 1)}
    assert (batches.kv_used_tokens, batches.host_kv_tokens, batches.running, batches.waiting) == (0, 0, 0, 0)
    assert batches.next_due_s is None


def test_a_detached_run_returns_to_a_batch_with_its_kv() -> None:
    batches = pipeline(2)
    for name in "12":
        batches.add(0.0, run(name, 20, 30))
    batches.advance(5.5)
    taken = batches.detach("2")
    batches.release(taken)
    assert batches.decoding_tokens("2") is None
    assert batches.attach(5.5, taken)
    batches.rejoin(taken)
    batches.advance(1_000.0)
    assert {each.run_id: each.end for each in batches.news() if each.done} == {"1": 30, "2": 30}
    assert spans_of(batches.progress()) == []


def test_stages_divide_the_gpus() -> None:
    limits = simulated_limits(AgentSettings(n_gpu=4, simulated={"pipeline_stages": 2, "prefill": "shared"}))
    assert (limits.pipeline_stages, limits.prefill) == (2, PrefillRule.SHARED)
    with pytest.raises(ConfigError, match="pipeline_stages"):
        simulated_limits(AgentSettings(n_gpu=1, simulated={"pipeline_stages": 2}))
