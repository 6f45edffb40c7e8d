"""The shipped table: every row is there, its figures are those of the measurements, and each names where they come from."""

from __future__ import annotations

from importlib.resources import files

import pytest
import yaml

from qlm_core.profiles.profile import HardwareProfile
from qlm_core.profiles.shipped_profiles import parse_hardware_profiles, shipped_snapshot

ROWS = {
    # weights GB, KV bytes and capacity, decode a b c, prefill base, per token and per squared token, loads from disk and host, KV swap,
    # recompute
    ("A10", 1, "Mistral-7B"): (14.48, 131072, 45008, 32.0, 0.14, 0.00033, 8.0, 0.205, 3.7e-6, 4.5, 0.84, 6.2, 205.0),
    ("A10", 2, "Vicuna-13B"): (26.03, 819200, 17968, 34.0, 0.17, 0.00091, 12.0, 0.22, 3.0e-6, 8.1, 1.23, 34.1, 220.0),
    ("A100-80GB", 1, "Mistral-7B"): (14.48, 131072, 460784, 12.0, 0.07, 0.00011, 8.0, 0.075, 1.7e-6, 4.5, 0.84, 6.2, 75.0),
    ("A100-80GB", 1, "Vicuna-13B"): (26.03, 819200, 59360, 21.0, 0.08, 0.00056, 15.0, 0.135, 2.7e-6, 8.1, 1.39, 39.0, 135.0),
    ("A100-80GB", 2, "Llama-2-70B"): (137.95, 327680, 36016, 53.0, 0.21, 0.00015, 40.0, 0.35, 4.4e-6, 43.1, 4.8, 10.9, 350.0),
    ("A100-80GB", 4, "Llama-2-70B"): (137.95, 327680, 486480, 31.0, 0.15, 7.5e-05, 25.0, 0.19, 2.2e-6, 43.1, 3.34, 7.4, 190.0),
    ("H100-80GB", 1, "Mistral-7B"): (14.48, 131072, 460416, 7.2, 0.05, 6e-05, 6.0, 0.026, 8.5e-7, 4.5, 0.42, 2.9, 26.0),
    ("H100-80GB", 1, "Vicuna-13B"): (26.03, 819200, 59296, 14.0, 0.06, 0.00033, 9.0, 0.046, 1.35e-6, 8.1, 0.68, 18.2, 46.0),
    ("H100-80GB", 2, "Llama-2-70B"): (137.95, 327680, 35728, 32.0, 0.16, 0.0001, 20.0, 0.13, 2.2e-6, 43.1, 2.45, 5.5, 130.0),
    ("H100-80GB", 4, "Llama-2-70B"): (137.95, 327680, 485888, 19.0, 0.11, 5e-05, 12.0, 0.07, 1.1e-6, 43.1, 1.72, 3.7, 70.0),
}
FIGURES = (
    "weights_gb",
    "kv_bytes_per_token",
    "kv_capacity_tokens",
    "decode_a_ms",
    "decode_b_ms_per_seq",
    "decode_c_ms_per_context_token",
    "prefill_base_ms",
    "prefill_ms_per_token",
    "prefill_ms_per_token_squared",
    "load_disk_to_cpu_s",
    "load_cpu_to_gpu_s",
    "kv_swap_us_per_token",
    "recompute_us_per_token",
)

TEXT = files("qlm_core").joinpath("data", "hardware_profiles.yaml").read_text(encoding="utf-8")


def test_every_row_is_shipped_with_its_figures() -> None:
    shipped = {row.key: row for row in shipped_snapshot().hardware}
    assert set(shipped) == set(ROWS)
    for key, figures in ROWS.items():
        assert tuple(getattr(shipped[key], name) for name in FIGURES) == figures
        assert (shipped[key].slowdown, shipped[key].samples, shipped[key].instance) == (1.0, 0, "")


def test_step_times_are_those_that_the_rows_were_checked_with() -> None:
    """Decode steps of one sequence with 500 tokens and of 32 with 16,384 in all, in ms, as the measurements' table states them."""
    stated = {
        ("A10", 1, "Mistral-7B"): (32.3, 41.8),
        ("A10", 2, "Vicuna-13B"): (34.6, 54.0),
        ("A100-80GB", 1, "Mistral-7B"): (12.1, 16.0),
        ("A100-80GB", 1, "Vicuna-13B"): (21.4, 32.5),
        ("A100-80GB", 4, "Llama-2-70B"): (31.2, 37.0),
        ("H100-80GB", 1, "Mistral-7B"): (7.3, 9.8),
        ("H100-80GB", 4, "Llama-2-70B"): (19.1, 23.3),
    }
    for row in shipped_snapshot().hardware:
        if row.key in stated:
            alone_ms, batch_ms = row.decode_step_s(1, 500) * 1e3, row.decode_step_s(32, 16_000) * 1e3
            assert (alone_ms, batch_ms) == pytest.approx(stated[row.key], abs=0.3)


def test_every_row_names_sources_and_evidence() -> None:
    document = yaml.safe_load(TEXT)
    for source in document["sources"].values():
        assert set(source) == {"from", "licence", "what"}
    for entry in document["profiles"]:
        assert entry["evidence"]
        assert set(entry["sources"]) == {"decode", "prefill", "load", "memory"}


def _changed(**changes: object) -> str:
    document = yaml.safe_load(TEXT)
    document["profiles"][0].update(changes)
    return yaml.safe_dump(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_changed(decode_a_ms="fast"), "decode_a_ms is a number"),
        (_changed(decode_a_ms=float("nan")), "decode_a_ms"),
        (_changed(decode_a_ms=True), "decode_a_ms is a number"),
        (_changed(prefill_ms_per_token=-1.0), "prefill_ms_per_token"),
        (_changed(color="red"), "color"),
        (_changed(sources={"decode": ["hearsay"]}), "sources"),
        (_changed(gpu="A100-80GB", n_gpu=1, model="Mistral-7B"), "key of an earlier one"),
        ("profiles: []", "two parts"),
    ],
)
def test_a_damaged_file_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hardware_profiles(text)


def test_a_file_of_ones_own_is_read() -> None:
    rows = parse_hardware_profiles(_changed(gpu="L4"))
    assert isinstance(rows[0], HardwareProfile)
    assert rows[0].gpu == "L4"
