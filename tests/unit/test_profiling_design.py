"""The experiment of `qlm profile` fits into any engine, and varies what it has to distinguish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_agent.profiling.design import (
    DECODE_STEPS,
    FIRST,
    KV_SHARE,
    PREFILL_BUDGET_TOKENS,
    PREFILL_REPEATS,
    WHOLE,
    EngineLimits,
    Extent,
    design,
)

LIMITS = st.builds(
    EngineLimits,
    context_tokens_max=st.integers(256, 200_000),
    kv_capacity_tokens=st.integers(2_048, 10_000_000),
    batch_max=st.integers(4, 2_000),
)


EXTENTS = st.sampled_from((WHOLE, FIRST))


@given(LIMITS, EXTENTS)
def test_everything_fits(limits: EngineLimits, extent: Extent) -> None:
    plan = design(limits, extent)
    room = KV_SHARE * limits.kv_capacity_tokens
    for batch in plan.batches:
        each = batch.prompt_tokens + batch.output_tokens
        assert 1 <= batch.sequences <= limits.batch_max
        assert each <= limits.context_tokens_max
        assert batch.sequences * each <= room
        assert batch.sequences * batch.prompt_tokens <= PREFILL_BUDGET_TOKENS
        assert batch.output_tokens >= DECODE_STEPS
    assert all(1 <= tokens < limits.context_tokens_max for tokens in plan.prefills)
    for sequences, prompt_tokens in plan.offloads:
        assert 1 <= sequences <= limits.batch_max
        assert 1 <= prompt_tokens < limits.context_tokens_max
        assert sequences * prompt_tokens <= room
    assert sum(plan.prefills) <= PREFILL_REPEATS * 2 * 8_192


@given(LIMITS, EXTENTS)
def test_base_sequences_and_context_can_be_distinguished(limits: EngineLimits, extent: Extent) -> None:
    plan = design(limits, extent)
    assert len({batch.sequences for batch in plan.batches}) >= 2
    assert len({batch.prompt_tokens for batch in plan.batches}) >= 2
    assert len(set(plan.prefills)) >= 3


def test_a_first_profile_is_a_few_runs() -> None:
    plan = design(EngineLimits(context_tokens_max=8_192, kv_capacity_tokens=460_784, batch_max=256), FIRST)
    assert sum(batch.sequences for batch in plan.batches) + len(plan.prefills) == 29  # two of them again
    assert plan.prefills == (16, 128, 512, 1_024)


def test_a_large_engine_gets_the_whole_experiment() -> None:
    plan = design(EngineLimits(context_tokens_max=8_192, kv_capacity_tokens=460_784, batch_max=256))
    assert [batch.sequences for batch in plan.batches] == [1, 4, 16, 64, 256, 4, 16, 16]
    assert max(plan.prefills) == 8_191
    assert plan.offloads == ((1, 64), (1, 256), (1, 1_024), (1, 2_000), (4, 2_000), (8, 2_000), (12, 2_000))


@given(LIMITS)
def test_all_of_a_batch_decode_together_for_long_enough(limits: EngineLimits) -> None:
    """On an engine that takes in 1,024 prompt tokens a step, in turn, and gives a token to each that is done with its prompt."""
    for batch in design(limits).batches:
        left, made, together = [batch.prompt_tokens] * batch.sequences, [0] * batch.sequences, 0
        while max(made) < batch.output_tokens:
            together += all(made)
            made = [tokens + (todo == 0) for tokens, todo in zip(made, left, strict=True)]
            room = 1_024
            for number, todo in enumerate(left):
                taken = min(todo, room)
                left[number], room = todo - taken, room - taken
                made[number] += taken > 0 and left[number] == 0  # a prefill makes the first token
        assert together >= DECODE_STEPS - 1


@pytest.mark.parametrize("limits", [(100, 10_000, 16), (8_192, 100, 16), (8_192, 10_000, 1)])
def test_an_engine_too_small_is_refused(limits: tuple[int, int, int]) -> None:
    context, kv, batch = limits
    with pytest.raises(ValueError, match="is profiled with at least"):
        design(EngineLimits(context_tokens_max=context, kv_capacity_tokens=kv, batch_max=batch))
