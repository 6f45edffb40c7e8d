"""How many requests run at once: `qlm_core.batch_size`, against the step-accurate engine where it predicts steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.batch_size import ClassDemand, choose_batch, step_s
from qlm_core.length_curve import curve_of_moments
from qlm_core.profile import WORKLOAD_PRIOR
from qlm_core.shipped_profiles import shipped_snapshot
from simulated_steps import make, run

MISTRAL = next(row for row in shipped_snapshot().hardware if row.key == ("A100-80GB", 1, "Mistral-7B"))


def demand(slo_s: float, arrivals_per_s: float, *, waiting: float = 0.0, running: float = 20.0, first_token: bool = False) -> ClassDemand:
    return ClassDemand(
        slo_s=slo_s,
        first_token=first_token,
        arrivals_per_s=arrivals_per_s,
        waiting=waiting,
        running=running,
        prompt_tokens=WORKLOAD_PRIOR.prompt_tokens_mean,
        outputs=WORKLOAD_PRIOR.output_curve(),
    )


CHAT, MINUTE, HOUR = demand(20.0, 3.0), demand(60.0, 1.5), demand(3600.0, 1.5)


LENGTHS = [(1_000, 200), (2_000, 25), (100, 400)]
CASES = [(sequences, *lengths) for sequences in (1, 16, 64, 256) for lengths in LENGTHS if sequences * lengths[0] <= 2_048 * lengths[1]]


@pytest.mark.parametrize(("sequences", "prompt", "output"), CASES)
def test_a_step_takes_as_long_as_on_the_step_accurate_engine(sequences: int, prompt: int, output: int) -> None:
    """With arrivals going on: each request that ends is replaced at once, where steps take in so many prompts. Known lengths, no bias, no
    noise."""

    def duration(decoding: int, context: int, prefills: Sequence[tuple[int, int]]) -> float:
        decode_s = MISTRAL.decode_step_s(decoding, context) if decoding else 1e-3 * MISTRAL.prefill_base_ms
        return decode_s + MISTRAL.prefill_work_s(sum(tokens for _, tokens in prefills))

    engine = make(duration, kv=1_000_000, batch_max=sequences, chunk=2_048)  # type: ignore[arg-type]
    for number in range(1, sequences + 1):
        # Ages of a batch that has gone on for long: evenly spread.
        engine.add(0.0, run(str(number), prompt, 1 + number * output // sequences))
    now_s, warm = 0.0, 2 * sequences
    ends: list[float] = []
    while len(ends) < 5 * sequences + 8:
        assert engine.next_due_s is not None
        now_s = max(now_s, engine.next_due_s)
        engine.advance(now_s)
        for each in engine.news():
            if each.done:
                ends.append(now_s)
                engine.add(now_s, run(str(sequences + len(ends)), prompt, output))
    served_s = (ends[-1] - ends[warm]) / (len(ends) - 1 - warm)
    linear = replace(MISTRAL, prefill_ms_per_token_squared=0.0)
    assert step_s(linear, sequences, prompt, output) == pytest.approx(served_s * sequences / output, rel=0.05)


def test_without_deadlines_or_with_time_to_spare_the_batch_is_the_largest() -> None:
    assert choose_batch(MISTRAL, [], 256) == 256
    assert choose_batch(MISTRAL, [demand(math.inf, 5.0)], 256) == 256
    assert choose_batch(MISTRAL, [demand(5.0, 5.0, first_token=True), demand(math.inf, 5.0)], 256) == 256
    assert choose_batch(MISTRAL, [HOUR], 256) == 256
    assert choose_batch(MISTRAL, [demand(20.0, 0.0, running=0.0)], 256) == 256, "all are late, and no more come"


def test_chat_among_patient_requests_gets_a_batch_that_is_fast_enough() -> None:
    """The cell with one model on two GPUs, of which one has half of the arrivals: the best by hand is 32 to 48."""
    assert 32 <= choose_batch(MISTRAL, [CHAT, MINUTE, HOUR], 256) <= 64


def test_what_must_be_served_makes_the_batch_larger() -> None:
    """As the patient class comes due, and where other models wait for the engine."""
    due = demand(3600.0, 1.5, waiting=4_000.0)
    light = [demand(20.0, 1.0), HOUR]
    assert choose_batch(MISTRAL, [CHAT, due], 256) > choose_batch(MISTRAL, [CHAT, HOUR], 256)
    assert choose_batch(MISTRAL, light, 256, share=0.3) > choose_batch(MISTRAL, light, 256)


def test_the_size_keeps_up_with_what_goes_on_coming() -> None:
    """Four fifths of the largest throughput, for as long as the longest SLO: to postpone it would end in a late backlog. What no size can
    keep up with decides nothing."""
    prompt, output = WORKLOAD_PRIOR.prompt_tokens_mean, WORKLOAD_PRIOR.output_tokens_mean

    def served_per_s(sequences: int) -> float:
        return sequences / (output * step_s(MISTRAL, sequences, prompt, output))

    demands = [demand(20.0, 2.0), demand(300.0, 2.0)]
    small, most = choose_batch(MISTRAL, demands, 256), served_per_s(256)
    assert served_per_s(small) < 0.8 * most
    sustained = choose_batch(MISTRAL, demands, 256, sustained_per_s=[1.0, 0.8 * most])
    assert served_per_s(sustained) == pytest.approx(0.8 * most, rel=0.05)
    assert choose_batch(MISTRAL, demands, 256, sustained_per_s=[1.0, 1.1 * most]) == small


def test_a_slower_engine_runs_no_more_at_once() -> None:
    light = [demand(20.0, 1.0), HOUR]
    sizes = [choose_batch(MISTRAL, light, 256, slowdown=slowdown) for slowdown in (0.5, 1.0)]
    assert sizes[0] >= sizes[1]


def test_in_mixed_overload_most_of_the_throughput_stays() -> None:
    over = [demand(20.0, 4.5, waiting=40.0), demand(60.0, 2.3, waiting=100.0), demand(300.0, 2.3, waiting=500.0)]
    size = choose_batch(MISTRAL, over, 256)

    def tokens_per_s(sequences: int) -> float:
        return sequences / step_s(MISTRAL, sequences, WORKLOAD_PRIOR.prompt_tokens_mean, WORKLOAD_PRIOR.output_tokens_mean)

    assert tokens_per_s(size) >= 0.7 * tokens_per_s(256)


@given(
    slos_s=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=6),
    rate=st.floats(0.0, 1e4),
    waiting=st.floats(0.0, 1e6),
    running=st.floats(0.0, 300.0),
    mean=st.floats(1.0, 1e5),
    batch_max=st.integers(1, 4_096),
    slowdown=st.floats(0.01, 100.0),
    share=st.floats(0.001, 1.0),
    sustained=st.lists(st.floats(0.0, 1e4), max_size=4),
)
def test_the_size_is_always_one_that_the_engine_allows(
    slos_s: list[float],
    rate: float,
    waiting: float,
    running: float,
    mean: float,
    batch_max: int,
    slowdown: float,
    share: float,
    sustained: list[float],
) -> None:
    outputs = curve_of_moments(mean, mean**2)
    demands = [
        replace(demand(slo_s, rate, waiting=waiting, running=running, first_token=number % 3 == 2), outputs=outputs)
        for number, slo_s in enumerate(slos_s)
    ]
    assert 1 <= choose_batch(MISTRAL, demands, batch_max, slowdown=slowdown, share=share, sustained_per_s=sustained) <= batch_max
