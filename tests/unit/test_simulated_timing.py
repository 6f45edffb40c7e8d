"""Durations of simulated steps: noise and bias as stated, and not the estimator's formula."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from qlm_agent.engines.simulated.timing import BIAS_MAX, InstanceNoise, StepTiming
from qlm_core.profiles.shipped_profiles import shipped_snapshot

PROFILE = next(row for row in shipped_snapshot().hardware if (row.gpu, row.model) == ("A100-80GB", "Mistral-7B"))


def noise(seed: int = 1, instance: str = "a", *, step_noise: float = 0.05, bias_max: float = BIAS_MAX) -> InstanceNoise:
    return InstanceNoise(seed=seed, instance=instance, step_noise=step_noise, bias_max=bias_max)


@pytest.mark.parametrize("step_noise", [0.05, 0.2])
def test_each_step_has_noise_of_at_least_five_percent_around_the_bias(step_noise: float) -> None:
    source = noise(step_noise=step_noise)
    factors = [source.factor() / source.bias for _ in range(20_000)]
    assert statistics.mean(factors) == pytest.approx(1.0, abs=4 * step_noise / 20_000**0.5)
    assert statistics.stdev(factors) == pytest.approx(step_noise, rel=0.03)
    assert min(factors) > 0.0


def test_bias_is_spread_over_its_whole_range_and_never_beyond() -> None:
    biases = [noise(seed, f"i{number}").bias for seed in range(10) for number in range(50)]
    assert all(abs(bias - 1.0) <= BIAS_MAX for bias in biases)
    assert min(biases) < 0.88
    assert max(biases) > 1.12
    assert statistics.mean(biases) == pytest.approx(1.0, abs=0.02)


def test_bias_is_of_the_instance_and_constant() -> None:
    assert noise(3, "a").bias == noise(3, "a").bias
    assert noise(3, "a").bias != noise(3, "b").bias
    assert noise(3, "a").bias != noise(4, "a").bias
    source = noise(step_noise=0.05)
    early, late = ([source.factor() for _ in range(5_000)] for _ in range(2))
    assert statistics.mean(early) == pytest.approx(source.bias, abs=0.005)
    assert statistics.mean(late) == pytest.approx(source.bias, abs=0.005)


@pytest.mark.parametrize("wrong", [{"step_noise": 0.04}, {"bias_max": 0.16}, {"bias_max": -0.01}, {"step_noise": float("nan")}])
def test_less_noise_or_more_bias_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="needed"):
        noise(**wrong)  # type: ignore[arg-type]


def mean_step_s(sequences: int, context_tokens: int, prefills: list[tuple[int, int]], time_scale: float = 1.0) -> float:
    timing = StepTiming(PROFILE, noise(bias_max=0.0), time_scale)
    return statistics.mean(timing.step_s(sequences, context_tokens, prefills) for _ in range(4_000))


def test_a_decode_step_follows_batch_and_context() -> None:
    assert mean_step_s(32, 16_000, []) == pytest.approx(0.016, rel=0.01)  # 12 + 32 * 0.07 + 16,000 * 0.00011 ms
    assert mean_step_s(32, 16_000, [], time_scale=10.0) == pytest.approx(0.0016, rel=0.01)


def test_a_long_prefill_has_a_quadratic_part_of_the_engines_own() -> None:
    assert mean_step_s(0, 0, [(0, 100)]) == pytest.approx(PROFILE.prefill_s(100), rel=0.01)
    long = mean_step_s(0, 0, [(0, 8_000)])
    linear = replace(PROFILE, prefill_ms_per_token_squared=0.0)
    assert long > 1.1 * linear.prefill_s(8_000)
    assert long != pytest.approx(PROFILE.prefill_s(8_000), rel=0.01)
    chunks = sum(mean_step_s(0, 0, [(start, 2_000)]) for start in range(0, 8_000, 2_000))
    assert chunks == pytest.approx(long + 3 * PROFILE.prefill_base_ms / 1e3, rel=0.01)  # each chunk pays the base


def test_a_mixed_step_reads_the_weights_once() -> None:
    both = mean_step_s(32, 16_000, [(0, 500)])
    apart = mean_step_s(32, 16_000, []) + mean_step_s(0, 0, [(0, 500)])
    assert both == pytest.approx(apart - PROFILE.prefill_base_ms / 1e3, rel=0.01)


def test_loads_take_what_the_profile_says() -> None:
    timing = StepTiming(PROFILE, noise(bias_max=0.0), 2.0)
    assert statistics.mean(timing.disk_to_host_s() for _ in range(2_000)) == pytest.approx(PROFILE.load_disk_to_cpu_s / 2, rel=0.01)
    assert statistics.mean(timing.host_to_gpu_s() for _ in range(2_000)) == pytest.approx(PROFILE.load_cpu_to_gpu_s / 2, rel=0.01)
