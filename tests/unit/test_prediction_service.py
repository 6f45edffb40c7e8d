"""Service of one class of requests: the formulas of QLM sections 2.4 and 6, their limits and how they move."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.prediction.prediction_service import longest_of, reserved_tokens, service
from qlm_core.profiles.profile import HardwareProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.distribution import Normal

ROWS = {row.key: row for row in shipped_snapshot().hardware}
MISTRAL = ROWS[("A100-80GB", 1, "Mistral-7B")]
VICUNA = ROWS[("A100-80GB", 1, "Vicuna-13B")]

rows = st.sampled_from(sorted(ROWS.values(), key=lambda row: row.key))
prompts = st.floats(0.0, 8_000.0)
outputs = st.builds(Normal, st.floats(1.0, 2_000.0), st.floats(0.0, 1e6))


def test_throughput_by_hand() -> None:
    """Fixed outputs of 200 after prompts of 600: each of the 256 sequences holds 600 + 100 tokens in the mean."""
    step_ms = 12.0 + 0.07 * 256 + 0.00011 * 256 * 700
    assert 1.0 / service(600, Normal.point(200.0), MISTRAL).token_s == pytest.approx(256 / step_ms * 1e3)


def test_the_kv_cache_limits_the_batch() -> None:
    """59,360 tokens have room for 74.2 sequences of 600 + 200: agents keep it for the whole expected output, and half of the next one is
    left on average."""
    assert service(600, Normal.point(200.0), VICUNA).batch == pytest.approx(59_360 / 800 - 0.5)
    assert service(600, Normal.point(200.0), VICUNA, 32).batch == 32
    assert service(100_000, Normal.point(200.0), VICUNA).batch == 1.0, "one that fits alone is served alone"


@pytest.mark.parametrize(("spread", "mean"), [(0.3, 200.0), (0.8, 200.0), (0.8, 120.0), (0.8, 400.0)])
def test_long_outputs_hold_what_is_reserved_as_they_grow(spread: float, mean: float) -> None:
    """Walks through the outputs of a class as the agent's table of runs reserves for them: `mean`, then half as much again each time."""
    outputs = 200.0 * np.exp(np.random.default_rng(1).normal(-(spread**2) / 2.0, spread, 20_000))
    held = 0.0
    for output in outputs.tolist():
        made, reserved = 0.0, mean
        while made < output:
            end = min(output, reserved)
            held += reserved * (end - made)
            made, reserved = end, 1.5 * reserved
    found = reserved_tokens(outputs.mean(), outputs.var(), mean)
    assert found == pytest.approx(held / outputs.sum(), rel=0.03)


def test_long_outputs_leave_room_for_fewer() -> None:
    reserved = reserved_tokens(200.0, 400.0**2, 200.0)
    assert reserved > 500.0
    assert service(600, Normal(200.0, 400.0**2), VICUNA).batch == pytest.approx((59_360 - 400) / (600 + reserved))


def test_prefills_limit_the_batch() -> None:
    """A step takes in 2,048 prompt tokens: of prompts of 10,000 a fifth joins in each step, and stays for 180 of them."""
    assert service(10_000, Normal.point(180.0), MISTRAL).batch == pytest.approx(180 * 2_048 / 10_000)
    served = service(10_000, Normal.point(180.0), MISTRAL)
    assert served.token_s * 180 == pytest.approx(served.step_s * 10_000 / 2_048), "each request pays for the steps of its prefill"


@pytest.mark.parametrize("row", [MISTRAL, replace(MISTRAL, prefill_ms_per_token_squared=0.0)])
def test_cached_prompts_are_prefilled_less_and_hold_as_much(row: HardwareProfile) -> None:
    """The last 2,500 tokens of 10,000 are computed: their attention reads all, 10,000^2 - 7,500^2."""
    whole, cached = (service(10_000, Normal.point(180.0), row, uncached_share=share) for share in (1.0, 0.25))
    by_hand_ms = row.prefill_ms_per_token * 2_500 + row.prefill_ms_per_token_squared * (10_000**2 - 7_500**2)
    assert cached.prefill_work_s == pytest.approx(by_hand_ms / 1e3)
    assert cached.prefill_s - cached.prefill_work_s == pytest.approx(row.prefill_base_ms / 1e3)
    assert row.prefill_s(10_000, 0.25) == pytest.approx(cached.prefill_s)
    assert (cached.sequence_s, cached.step_base_s) == (whole.sequence_s, whole.step_base_s)
    # Prefills limit the batch of whole prompts, KV that of cached ones.
    assert cached.batch == pytest.approx(min(4 * whole.batch, row.kv_capacity_tokens / 10_180 - 0.5))


def test_attention_makes_long_prompts_dearer() -> None:
    even, uneven = service(4_000, Normal.point(200.0), MISTRAL), service(4_000, Normal.point(200.0), MISTRAL, prompt_variance=1e6)
    row = MISTRAL
    assert even.prefill_work_s == pytest.approx(1e-3 * (4_000 * row.prefill_ms_per_token + 4_000**2 * row.prefill_ms_per_token_squared))
    assert uneven.prefill_work_s - even.prefill_work_s == pytest.approx(1e-3 * 1e6 * row.prefill_ms_per_token_squared)


def test_work_is_known_prompt_and_expected_output() -> None:
    output = Normal(200.0, 100.0**2)
    served = service(600, output, MISTRAL)
    assert served.work.mean == pytest.approx(served.prefill_work_s + 199 * served.token_s)
    assert served.work.deviation == pytest.approx(100 * served.token_s), "the prompts are known: only outputs vary"
    assert service(600, Normal.point(200.0), MISTRAL).work.variance == 0.0


@pytest.mark.parametrize("prompt_tokens", [-1, math.nan, math.inf])
def test_refuses_impossible_prompts(prompt_tokens: float) -> None:
    with pytest.raises(ValueError, match="finite number"):
        service(prompt_tokens, Normal(100.0, 1.0), MISTRAL)


@pytest.mark.parametrize(("mean", "batch_max"), [(0.0, 256), (-5.0, 256), (100.0, 0), (100.0, math.nan)])
def test_refuses_impossible_outputs_and_batches(mean: float, batch_max: float) -> None:
    with pytest.raises(ValueError, match=r"above zero|batch_max"):
        service(10, Normal(mean, 1.0), MISTRAL, batch_max)


@given(rows, prompts, outputs, st.floats(1.0, 4.0))
def test_work_grows_with_prompt_output_and_slowness(row: HardwareProfile, prompt: float, output: Normal, factor: float) -> None:
    base = service(prompt, output, row).work.mean
    slack = 1e-9 * base
    assert service(prompt * factor, output, row).work.mean >= base - slack
    assert service(prompt, Normal(output.mean * factor, output.variance), row).work.mean >= base - slack
    assert service(prompt, output, row.scaled(1.0 / factor)).work.mean == pytest.approx(base * factor)


@given(rows, prompts, outputs, st.integers(1, 256), st.integers(1, 256))
def test_a_larger_batch_gives_more_tokens_and_slower_steps(
    row: HardwareProfile, prompt: float, output: Normal, one: int, other: int
) -> None:
    small, large = sorted((one, other))
    at_small, at_large = service(prompt, output, row, small), service(prompt, output, row, large)
    assert at_large.token_s <= at_small.token_s * (1 + 1e-12)
    assert at_large.step_s >= at_small.step_s * (1 - 1e-12)


@given(rows, prompts, outputs, st.floats(1, 300), st.floats(0, 300), st.floats(0, 300))
def test_decode_time_grows_with_what_shares_the_engine(
    row: HardwareProfile, prompt: float, output: Normal, sequences: float, more: float, behind: float
) -> None:
    served = service(prompt, output, row)
    base = served.decode(sequences, 0.0)
    assert base.mean >= output.mean * served.step_base_s
    assert served.decode(sequences + more, 0.0).mean >= base.mean * (1 - 1e-12)
    assert served.decode(sequences, behind).mean >= base.mean
    assert served.decode(sequences, behind).variance >= base.variance, "a longer output lets more of them join"


def test_epsilon_is_the_prefills_of_those_that_join() -> None:
    """In a full batch of B with enough waiting, B requests join in the time of one decode: each step pays B / E[O] prefills."""
    served = service(1_155, Normal(211.0, 163.0**2), MISTRAL)
    epsilon = served.decode(256, 10_000).mean / (211.0 * served.step_s)
    assert epsilon == pytest.approx(1.0 + 256 / 211.0 * served.prefill_work_s / served.step_s)
    assert served.decode(256, 0).mean == pytest.approx(211.0 * served.step_s)


@given(rows, prompts, outputs, st.floats(1, 300), st.booleans(), st.floats(0, 300), st.floats(0, 300))
def test_drain_takes_longer_with_more_behind(
    row: HardwareProfile, prompt: float, output: Normal, in_flight: float, full: bool, behind: float, more: float
) -> None:
    served = service(prompt, output, row)
    base = served.drain(in_flight, full, behind)
    assert base.mean > 0.0
    assert served.drain(in_flight, full, behind + more).mean >= base.mean * (1 - 1e-12)


def test_longest_of_many_against_draws() -> None:
    rng = random.Random(7)
    for count in (1, 2, 5, 20, 100):
        draws = [max(rng.gauss(1_000.0, 100.0) for _ in range(count)) for _ in range(4_000)]
        mean = sum(draws) / len(draws)
        variance = sum((draw - mean) ** 2 for draw in draws) / len(draws)
        found = longest_of(Normal(1_000.0, 100.0**2), count)
        assert found.mean == pytest.approx(mean, abs=12.0)
        assert found.deviation == pytest.approx(math.sqrt(variance), rel=0.25)
