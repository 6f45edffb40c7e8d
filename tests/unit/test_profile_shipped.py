"""The shipped table: its figures are those of the measurements, and each row names where they come from."""

from __future__ import annotations

from importlib.resources import files

import pytest
import yaml

from qlm_core.profiles.profile import HardwareProfile
from qlm_core.profiles.shipped_profiles import parse_hardware_profiles, shipped_snapshot

TEXT = files("qlm_core").joinpath("data", "hardware_profiles.yaml").read_text(encoding="utf-8")


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
    shipped = {row.key: row for row in shipped_snapshot().hardware}
    for key, figures in stated.items():
        assert (shipped[key].decode_step_s(1, 500) * 1e3, shipped[key].decode_step_s(32, 16_000) * 1e3) == pytest.approx(figures, abs=0.3)


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
