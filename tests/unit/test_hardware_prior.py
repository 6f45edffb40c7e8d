"""Priors from facts: checked against the shipped rows, each predicted by constants fitted without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import least_squares

from qlm_core.profiles.hardware_prior import EFFICIENCY, Efficiency, GpuFacts, gpu_facts, hardware_prior, model_facts
from qlm_core.profiles.hardware_profile import ORIGIN_FACTS, HardwareProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.model import ModelFacts

ROWS = shipped_snapshot().hardware
FITTED = (
    "decode_a_ms",
    "decode_b_ms_per_seq",
    "decode_c_ms_per_context_token",
    "prefill_base_ms",
    "prefill_ms_per_token",
    "prefill_ms_per_token_squared",
    "load_cpu_to_gpu_s",
    "kv_swap_us_per_token",
)
"""Figures that the constants of `Efficiency` are for."""


def prior_of(row: HardwareProfile, efficiency: Efficiency = EFFICIENCY) -> HardwareProfile:
    found = hardware_prior(row.gpu, row.n_gpu, row.model, efficiency=efficiency)
    assert found is not None
    return found


def fitted(rows: Sequence[HardwareProfile]) -> Efficiency:
    """The constants that are closest to these rows in all figures, in logarithms and with outliers held down."""
    names = [item.name for item in fields(Efficiency)]

    def log_errors(logs: np.ndarray) -> list[float]:
        efficiency = Efficiency(**dict(zip(names, np.exp(logs).tolist(), strict=True)))
        pairs = [(row, prior_of(row, efficiency)) for row in rows]
        return [math.log(getattr(prior, name) / getattr(row, name)) for row, prior in pairs for name in FITTED]

    start = np.log(np.array([getattr(EFFICIENCY, name) for name in names]))
    found = least_squares(log_errors, start, loss="soft_l1", f_scale=0.1)
    return Efficiency(**dict(zip(names, np.exp(found.x).tolist(), strict=True)))


def decode_ms(row: HardwareProfile) -> float:
    return row.decode_step_s(32, 16_000) * 1e3


def prefill_ms(row: HardwareProfile) -> float:
    return row.prefill_s(1_000) * 1e3


@cache
def left_out(part: str) -> dict[tuple[str, int, str], HardwareProfile]:
    """The prior of each shipped pair, by constants that know no row alike in `part`: "key", "gpu" or "model"."""
    found: dict[tuple[str, int, str], HardwareProfile] = {}
    for value in {getattr(row, part) for row in ROWS}:
        efficiency = fitted([row for row in ROWS if getattr(row, part) != value])
        found |= {row.key: prior_of(row, efficiency) for row in ROWS if getattr(row, part) == value}
    return found


def factors(part: str, figure: Callable[[HardwareProfile], float]) -> list[float]:
    """By how much the larger of prior and row is above the other, less one: 0.1 is 10%."""
    return [math.exp(abs(math.log(figure(left_out(part)[row.key]) / figure(row)))) - 1.0 for row in ROWS]


def test_the_constants_are_those_that_fit_the_shipped_rows() -> None:
    best = asdict(fitted(ROWS))
    for name, value in asdict(EFFICIENCY).items():
        assert value == pytest.approx(best[name], rel=0.05), best


@pytest.mark.parametrize(
    ("part", "decode_mean", "decode_worst", "prefill_mean", "prefill_worst"),
    [("key", 0.06, 0.16, 0.08, 0.15), ("gpu", 0.07, 0.16, 0.11, 0.17), ("model", 0.09, 0.24, 0.08, 0.15)],
)
def test_pairs_that_are_left_out_are_predicted(
    part: str, decode_mean: float, decode_worst: float, prefill_mean: float, prefill_worst: float
) -> None:
    """As the module states it, rounded up."""
    decode, prefill = factors(part, decode_ms), factors(part, prefill_ms)
    assert fmean(decode) < decode_mean
    assert max(decode) < decode_worst
    assert fmean(prefill) < prefill_mean
    assert max(prefill) < prefill_worst


def test_sizes_of_the_shipped_pairs_follow_from_facts() -> None:
    for row in ROWS:
        prior = prior_of(row)
        assert prior.weights_gb == pytest.approx(row.weights_gb, rel=0.001)
        assert prior.kv_bytes_per_token == row.kv_bytes_per_token
        assert prior.kv_capacity_tokens == pytest.approx(row.kv_capacity_tokens, rel=0.07)
        assert prior.load_disk_to_cpu_s == pytest.approx(row.load_disk_to_cpu_s, rel=0.01)
        assert prior.recompute_us_per_token == pytest.approx(row.recompute_us_per_token, rel=0.2)
        assert (prior.origin, prior.samples, prior.slowdown, prior.instance) == (ORIGIN_FACTS, 0, 1.0, "")


def test_an_unknown_gpu_or_model_and_one_that_does_not_fit_have_none() -> None:
    assert hardware_prior("B300", 1, "Mistral-7B") is None
    assert hardware_prior("A100-80GB", 1, "Unheard-of") is None
    assert hardware_prior("A100-80GB", 1, "Llama-2-70B") is None  # 138 GB into 80
    assert hardware_prior("A100-80GB", 0, "Mistral-7B") is None
    assert hardware_prior("A100-80GB", 2, "Llama-2-70B") is not None


def test_facts_of_ones_own_stand_before_those_that_are_known() -> None:
    small = ModelFacts(parameters_billion=1.0, layers=16, hidden_size=2048, kv_heads=8, head_size=64)
    own, known = hardware_prior("H200", 1, "Mistral-7B", small), hardware_prior("H200", 1, "Mistral-7B")
    assert own is not None
    assert known is not None
    assert own.weights_gb == 2.0
    assert own.decode_a_ms < known.decode_a_ms
    assert hardware_prior("H200", 1, "Unheard-of", small) == replace(own, model="Unheard-of")


@pytest.mark.parametrize("name", ["parameters_billion", "layers", "hidden_size", "kv_heads", "head_size"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_absurd_facts_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(model_facts()["Mistral-7B"], **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [item.name for item in fields(GpuFacts)])
def test_absurd_facts_of_a_gpu_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(gpu_facts()["L4"], **{name: -1.0})


def test_an_expert_mixture_reads_all_weights_and_computes_with_a_few() -> None:
    dense, sparse = model_facts()["Qwen2.5-32B"], model_facts()["Mixtral-8x7B"]
    found = [hardware_prior("H200", 1, "m", facts) for facts in (dense, sparse)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].decode_a_ms > found[0].decode_a_ms
    assert found[1].prefill_ms_per_token < found[0].prefill_ms_per_token
    with pytest.raises(ValueError, match="active_billion"):
        replace(sparse, active_billion=100.0)


@given(st.sampled_from(sorted(gpu_facts())), st.sampled_from([1, 2, 4, 8]), st.sampled_from(sorted(model_facts())))
def test_more_gpus_are_never_slower_and_hold_more(gpu: str, n_gpu: int, model: str) -> None:
    few, many = hardware_prior(gpu, n_gpu, model), hardware_prior(gpu, 2 * n_gpu, model)
    if few is None:
        return
    assert many is not None
    assert many.kv_capacity_tokens > 2 * few.kv_capacity_tokens
    assert many.prefill_s(1_000) < few.prefill_s(1_000)
    assert many.load_cpu_to_gpu_s < few.load_cpu_to_gpu_s
