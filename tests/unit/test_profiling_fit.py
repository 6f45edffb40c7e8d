"""The fit finds the profile that made the durations, says how sure it is, and does not follow outliers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from qlm_agent.profiling.fitting import Figure, fit
from qlm_agent.profiling.measurements import DecodeWindow, KvTransfer, Measurements, Prefill
from qlm_agent.profiling.rows import profiled, table_text
from qlm_core.profiles.hardware_prior import hardware_prior, model_facts
from qlm_core.profiles.hardware_profile import ORIGIN_MEASURED, HardwareProfile
from qlm_core.profiles.shipped_profiles import parse_hardware_profiles, shipped_snapshot

ROW = next(row for row in shipped_snapshot().hardware if (row.gpu, row.model) == ("A100-80GB", "Mistral-7B"))
SIZES = [(1, 50), (4, 200), (16, 800), (64, 3_200), (256, 12_800), (4, 12_000), (16, 24_000), (16, 48_000)]
DECODE = ("decode_a_ms", "decode_b_ms_per_seq", "decode_c_ms_per_context_token")


def measured(seed: int = 0, *, noise: float = 0.05, row: HardwareProfile = ROW) -> Measurements:
    """Measurements of an engine with this profile and this noise on each step, load and transfer."""
    random = np.random.default_rng(seed)

    def noisy(seconds: float, steps: int = 1) -> float:
        return seconds * (1.0 + noise / math.sqrt(steps) * float(random.standard_normal()))

    found = Measurements(model="m", kv_capacity_tokens=row.kv_capacity_tokens, prefill_chunk_tokens=0)
    for sequences, context in SIZES:
        for steps in (5, 12, 15, 16):
            seconds = noisy(steps * row.decode_step_s(sequences, context), steps)
            found.windows.append(DecodeWindow(steps=steps, sequences=sequences, context_tokens=context, seconds=seconds))
    for tokens in (16, 128, 512, 1024, 2048, 4096, 8192) * 3:
        found.prefills.append(Prefill(tokens=tokens, seconds=noisy(row.prefill_s(tokens))))
    found.prefills += [Prefill(tokens=2_000, seconds=noisy(row.prefill_s(2_000)), resumed=True) for _ in range(4)]
    found.loads_cold_s.append(noisy(row.load_disk_to_cpu_s))
    found.loads_warm_s += [noisy(row.load_cpu_to_gpu_s) for _ in range(3)]
    for tokens in (2_000, 8_000, 16_000, 24_000) * 2:
        found.offloads.append(KvTransfer(tokens=tokens, seconds=0.001 + noisy(row.kv_swap_us_per_token * 1e-6 * tokens)))
    return found


def value(figures: dict[str, Figure], name: str) -> float:
    return figures[name].value


def test_without_noise_the_profile_comes_back() -> None:
    figures = fit(measured(noise=0.0)).figures
    for name in (*DECODE, "prefill_base_ms", "prefill_ms_per_token", "prefill_ms_per_token_squared"):
        assert value(figures, name) == pytest.approx(getattr(ROW, name), rel=0.001)
    for name in ("load_disk_to_cpu_s", "load_cpu_to_gpu_s", "kv_swap_us_per_token"):
        assert value(figures, name) == pytest.approx(getattr(ROW, name), rel=0.01)
    assert value(figures, "kv_swap_base_ms") == pytest.approx(1.0, rel=0.01)


def test_transfers_of_one_size_have_no_base() -> None:
    found = measured(noise=0.0)
    found.offloads = [KvTransfer(tokens=2_000, seconds=0.01)] * 3
    figures = fit(found).figures
    assert (value(figures, "kv_swap_base_ms"), value(figures, "kv_swap_us_per_token")) == pytest.approx((0.0, 5.0))


@pytest.mark.parametrize("seed", range(5))
def test_with_the_noise_of_an_engine_it_comes_close(seed: int) -> None:
    found = fit(measured(seed), ROW.prefill_ms_per_token_squared)
    for sequences, context in SIZES:
        step_ms = value(found.figures, DECODE[0]) + value(found.figures, DECODE[1]) * sequences + value(found.figures, DECODE[2]) * context
        assert step_ms == pytest.approx(1e3 * ROW.decode_step_s(sequences, context), rel=0.03)
    assert value(found.figures, "prefill_ms_per_token") == pytest.approx(ROW.prefill_ms_per_token, rel=0.08)
    assert found.decode_error < 0.03
    assert found.prefill_error < 0.08


def test_intervals_hold_what_they_should() -> None:
    """95% of 60 intervals of each coefficient, give or take three standard deviations of that count."""
    seeds = range(60)
    found = [fit(measured(seed)).figures for seed in seeds]
    for name in DECODE:
        held = sum((figures[name].low or 0.0) <= getattr(ROW, name) <= (figures[name].high or 0.0) for figures in found)
        assert held >= 0.95 * len(seeds) - 3.0 * math.sqrt(0.95 * 0.05 * len(seeds)), name


def test_resumed_prefills_measure_recomputing_and_not_prefills() -> None:
    """An engine whose recomputed token costs 90 us beside the base of a prefill, where one of a prompt costs 75."""
    found = measured(noise=0.0)
    found.prefills = [each for each in found.prefills if not each.resumed]
    for tokens in (1_000, 2_000, 4_000) * 2:
        found.prefills.append(Prefill(tokens=tokens, seconds=1e-3 * (ROW.prefill_base_ms + 0.09 * tokens), resumed=True))
    figures = fit(found).figures
    assert value(figures, "recompute_us_per_token") == pytest.approx(90.0, rel=0.001)
    assert value(figures, "prefill_ms_per_token") == pytest.approx(ROW.prefill_ms_per_token, rel=0.001)
    found.prefills = [each for each in found.prefills if not each.resumed]
    assert value(fit(found).figures, "recompute_us_per_token") == pytest.approx(75.0, rel=0.001), "as a prefill, where nobody knows"


def test_outliers_do_not_move_it() -> None:
    """One window in eight during which the host did something else."""
    clean, dirty = measured(1), measured(1)
    dirty.windows[::8] = [replace(each, seconds=5.0 * each.seconds) for each in dirty.windows[::8]]
    dirty.prefills[::8] = [replace(each, seconds=5.0 * each.seconds) for each in dirty.prefills[::8]]
    expected, found = fit(clean).figures, fit(dirty).figures
    for sequences, context in SIZES:
        steps = [
            value(figures, DECODE[0]) + value(figures, DECODE[1]) * sequences + value(figures, DECODE[2]) * context
            for figures in (expected, found)
        ]
        assert steps[1] == pytest.approx(steps[0], rel=0.05)
    assert value(found, "prefill_ms_per_token") == pytest.approx(value(expected, "prefill_ms_per_token"), rel=0.15)


def test_a_quadratic_part_that_is_noise_is_left_out_and_a_prior_keeps_it() -> None:
    linear = replace(ROW, prefill_ms_per_token_squared=0.0)
    assert fit(measured(3, row=linear)).figures["prefill_ms_per_token_squared"].value == 0.0
    short = measured(3)
    short.prefills = [each for each in short.prefills if each.tokens <= 2_048]
    kept = fit(short, ROW.prefill_ms_per_token_squared).figures["prefill_ms_per_token_squared"].value
    assert kept == pytest.approx(ROW.prefill_ms_per_token_squared, rel=0.6)


def test_every_chunk_pays_the_base() -> None:
    found = measured(noise=0.0)
    chunked = [
        replace(each, seconds=each.seconds + (math.ceil(each.tokens / 2_048) - 1) * ROW.prefill_base_ms * 1e-3)
        for each in found.prefills
        if not each.resumed
    ]
    found.prefills, found.prefill_chunk_tokens = chunked, 2_048
    assert value(fit(found).figures, "prefill_base_ms") == pytest.approx(ROW.prefill_base_ms, rel=0.001)


def test_theta_is_the_throughput_of_the_largest_batch() -> None:
    fitted = fit(measured(noise=0.0))
    assert fitted.theta_sequences == 256
    assert fitted.theta_tokens_per_s == pytest.approx(256 / ROW.decode_step_s(256, 12_800))


@pytest.mark.parametrize(
    ("windows", "prefills", "message"),
    [
        (slice(0, 0), slice(None), "decode batches"),
        (slice(0, 8), slice(None), "decode batches"),  # sequences and context grow together
        (slice(None), slice(0, 2), "prefills"),
        (slice(None), slice(0, 0), "prefills"),
    ],
)
def test_too_few_measurements_are_said_so(windows: slice, prefills: slice, message: str) -> None:
    found = measured()
    found.windows, found.prefills = found.windows[windows], found.prefills[prefills]
    with pytest.raises(ValueError, match=f"too few measurements: {message}"):
        fit(found)


def test_a_row_says_what_was_measured_and_fills_the_rest_with_what_was_believed() -> None:
    found = measured()
    found.offloads = []
    model = profiled(fit(found), found, gpu="A100-80GB", n_gpu=1, profile="Mistral-7B", before=ROW, facts=model_facts()["Mistral-7B"])
    assert model.row.origin == ORIGIN_MEASURED
    assert model.row.kv_swap_us_per_token == ROW.kv_swap_us_per_token
    assert model.row.kv_bytes_per_token == ROW.kv_bytes_per_token
    assert found.notes == [f"kv_swap_{name} was not measured: it is the prior figure" for name in ("us_per_token", "base_ms")]
    (read,) = parse_hardware_profiles(table_text([model]))
    assert replace(read, origin=ORIGIN_MEASURED) == model.row


def test_sizes_are_those_that_the_engine_reports() -> None:
    """Not those of the facts, which know nothing of how its weights are stored."""
    found = measured()
    sizes = []
    for found.weights_gb, found.kv_bytes_per_token, found.kv_capacity_tokens in ((0.0, 0.0, 100_000), (7.4, 65_535.6, 200_000)):
        facts = model_facts()["Mistral-7B"]
        row = profiled(fit(found), found, gpu="A100-80GB", n_gpu=1, profile="Mistral-7B", before=ROW, facts=facts).row
        sizes.append((row.weights_gb, row.kv_bytes_per_token, row.kv_capacity_tokens))
    assert sizes == [(ROW.weights_gb, ROW.kv_bytes_per_token, 100_000), (7.4, 65_536, 200_000)]


def test_without_anything_known_a_missing_figure_is_an_error() -> None:
    found = measured()
    found.loads_cold_s = []
    with pytest.raises(ValueError, match=r"own on 1 x B300 has no prior: .*load_disk_to_cpu_s"):
        profiled(fit(found), found, gpu="B300", n_gpu=1, profile="own", before=None, facts=None)
    assert hardware_prior("B300", 1, "own") is None
