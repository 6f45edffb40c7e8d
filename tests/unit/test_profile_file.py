"""Exported profiles come back as they were, and damaged files are refused by row and field."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qlm_core.profiles.calibration import CalibratedTime, CalibrationProfile, CalibrationTable
from qlm_core.profiles.hardware_profile import ORIGIN_FACTS, ORIGIN_MEASURED, HardwareProfile
from qlm_core.profiles.importable_profiles import ROWS_MAX, importable
from qlm_core.profiles.profile import ProfileSnapshot, WorkloadProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.length_model import LengthModel, LengthScore
from qlm_process.profile_file import dump_profiles, parse_profiles

SHIPPED = shipped_snapshot()
A100 = next(row for row in SHIPPED.hardware if (row.gpu, row.model) == ("A100-80GB", "Mistral-7B"))
LEARNED = replace(A100, instance="a100-0", slowdown=1.125, samples=30, prior_share=0.25)
MEASURED = replace(A100, gpu="L4", kv_capacity_tokens=20_000, origin=ORIGIN_MEASURED)
CHAT = WorkloadProfile(
    model="chat",
    slo_class="64s",
    token_class="1024",
    prompt_tokens_mean=500.5,
    prompt_tokens_variance=10.0,
    output_tokens_mean=100.0,
    output_tokens_variance=2_000.0,
    samples=7,
)
SNAPSHOT = ProfileSnapshot(
    version=9,
    made_s=1234.5,
    hardware=(*SHIPPED.hardware, LEARNED, MEASURED, replace(A100, gpu="H200", origin=ORIGIN_FACTS)),
    workload=(CHAT,),
    length_model=LengthModel(
        features=(1, 9),
        weights=(0.5, -0.25),
        curvatures=(1.0, 2.0),
        scores=(LengthScore(model="chat", used=True, samples=9, median_error_tokens=50.0, model_error_tokens=40.0),),
    ),
    calibration=CalibrationTable(
        (CalibrationProfile(time=CalibratedTime.WAIT, model="chat", bias_factor=1.1, evidence_s=90.0, samples=12.5),)
    ),
)
TEXT = dump_profiles(SNAPSHOT)


def test_an_export_comes_back_without_what_ships_or_follows_from_facts() -> None:
    found = parse_profiles(TEXT)
    assert found == replace(SNAPSHOT, version=0, made_s=0.0, hardware=(LEARNED, MEASURED))
    assert dump_profiles(replace(found, version=9, made_s=1234.5)) == TEXT


POSITIVE = st.floats(1e-6, 1e6)
ROWS = st.builds(
    HardwareProfile,
    gpu=st.sampled_from(["X1", "a b: c", "4090", "null"]),
    n_gpu=st.integers(1, 8),
    model=st.sampled_from(["m", "true", "1e5", "Ünï-7B"]),
    instance=st.text(min_size=1, max_size=10),
    weights_gb=st.just(1.0),
    kv_bytes_per_token=st.just(1),
    kv_capacity_tokens=st.integers(1, 10**12),
    decode_a_ms=POSITIVE,
    decode_b_ms_per_seq=POSITIVE,
    decode_c_ms_per_context_token=st.floats(0.0, 1e-3),
    prefill_base_ms=POSITIVE,
    prefill_ms_per_token=POSITIVE,
    prefill_ms_per_token_squared=st.floats(0.0, 1e-3),
    load_disk_to_cpu_s=POSITIVE,
    load_cpu_to_gpu_s=POSITIVE,
    kv_swap_us_per_token=POSITIVE,
    recompute_us_per_token=POSITIVE,
    slowdown=st.floats(1.0 / 16.0, 16.0),
    samples=st.integers(1, 10**9),
    prior_share=st.floats(0.0, 1.0),
    origin=st.sampled_from(["", "facts", "measured"]),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROWS, min_size=1, max_size=3, unique_by=lambda row: (row.instance, row.model)))
def test_whatever_was_learned_comes_back_exactly(rows: list[HardwareProfile]) -> None:
    """Names that YAML could take for something else, and numbers to their last bit."""
    snapshot = ProfileSnapshot(version=0, made_s=0.0, hardware=tuple(rows))
    assert parse_profiles(dump_profiles(snapshot)) == snapshot


def changed(part: str, number: int, **fields: object) -> str:
    document = yaml.safe_load(TEXT)
    document[part][number].update(fields)
    return yaml.safe_dump(document)


def without(part: str, number: int, field: str) -> str:
    document = yaml.safe_load(TEXT)
    del document[part][number][field]
    return yaml.safe_dump(document)


def twice(part: str) -> str:
    document = yaml.safe_load(TEXT)
    document[part].append(document[part][0])
    return yaml.safe_dump(document)


DAMAGED: dict[str, tuple[str, str]] = {
    "unknown field": (changed("hardware", 0, colour="red"), "hardware row 1.colour: Unexpected keyword argument"),
    "missing field": (without("hardware", 1, "gpu"), "hardware row 2.gpu: Field required"),
    "NaN": (changed("hardware", 0, decode_a_ms=float("nan")), "decode_a_ms is finite and >= 0, got nan"),
    "infinite": (changed("workload", 0, output_tokens_mean=float("inf")), "output_tokens_mean is finite"),
    "negative": (changed("hardware", 0, prefill_ms_per_token=-1.0), "prefill_ms_per_token is finite and >= 0, got -1.0"),
    "text for a number": (changed("hardware", 0, decode_a_ms="12 ms"), "hardware row 1.decode_a_ms: Input should be a valid number"),
    "yes for a number": (changed("hardware", 0, n_gpu=True), "hardware row 1.n_gpu: Input should be a valid integer"),
    "number for a name": (changed("hardware", 0, gpu=4090), "hardware row 1.gpu: Input should be a valid string"),
    "half a GPU": (changed("hardware", 0, n_gpu=1.5), "hardware row 1.n_gpu: Input should be a valid integer"),
    "no GPU": (changed("hardware", 0, n_gpu=0), "n_gpu, kv_capacity_tokens >= 1"),
    "share above one": (changed("hardware", 0, prior_share=1.5), "prior_share is from 0 to 1"),
    "twice the same instance": (twice("hardware"), r"hardware profile ('a100-0', 'Mistral-7B'): given twice"),
    "twice the same class": (twice("workload"), r"workload profile ('chat', '64s', '1024'): given twice"),
    "absurd slowdown": (changed("hardware", 0, slowdown=100.0), "slowdown is from 1/16 to 16"),
    "slowdown without runs": (changed("hardware", 0, samples=0), "a slowdown of 1.125 contradicts samples of 0"),
    "slowdown of nobody": (changed("hardware", 1, slowdown=2.0), "the row names none"),
    "more KV than memory": (changed("hardware", 1, kv_capacity_tokens=10**9), "which contradicts 1 x 24.2 GB of memory"),
    "two KV sizes of one model": (changed("hardware", 1, kv_bytes_per_token=1_000), "kv_bytes_per_token of 1000 and 131072 contradict"),
    "two weights of one model": (changed("hardware", 1, weights_gb=10.0), "weights_gb of 10 and 14.48 contradict"),
    "nameless GPU": (changed("hardware", 0, gpu=""), "gpu and model are names"),
    "absurd calibration": (changed("calibration", 0, bias_factor=0.0), "bias_factor finite and > 0"),
    "unknown time": (changed("calibration", 0, time="lunch"), "calibration row 1.time"),
    "odd length model": (changed("length_model", 0, weights=[1.0]), "length_model row 1: a length model has one weight"),
    "absurd length model": (changed("length_model", 0, weights=[0.5, -30.0]), "length model: weights are logarithms from -20 to 20"),
    "absurd score": (
        changed(
            "length_model", 0, scores=[{"model": "m", "used": True, "samples": 9, "median_error_tokens": 1e200, "model_error_tokens": 1.0}]
        ),
        "length score of m: errors are at most 1048576 tokens",
    ),
    "absurd curvatures": (changed("length_model", 0, curvatures=[1.0, 1e30]), "length model: curvatures are at most 1e+09"),
    "absurd bias": (changed("calibration", 0, bias_factor=1e300), "bias_factor is from 1/16 to 16"),
    "two length models": (twice("length_model"), "length_model: at most one"),
    "not YAML": ("hardware: [", "not YAML"),
    "a tag": ("!!python/object:os.system {}", "not YAML"),
    "very deep": ("[" * 20_000, "not YAML"),
    "a date": (changed("hardware", 0, slowdown=None).replace("slowdown: null", "slowdown: 2001-01-01"), "hardware: "),
    "a list": ("[]", "no parts by name"),
    "nothing": ("", "no parts by name"),
    "another format": ("qlm_profiles: 2\nhardware: []\n", "qlm_profiles is 2, not 1"),
    "unknown part": ("qlm_profiles: 1\nsoftware: []\n", "unknown parts software"),
    "rows of no list": ("qlm_profiles: 1\nhardware: 7\n", "hardware: Input should be a valid"),
    "no rows": ("qlm_profiles: 1\nhardware: []\n", "no rows to import"),
    "a row of unknown origin": (
        without("hardware", 1, "origin"),
        "hardware row 2: a row without instance has the origin 'measured', got ''",
    ),
}


@pytest.mark.parametrize(("text", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_profiles(text)


def test_a_file_of_the_shipped_table_is_taken_as_measured() -> None:
    """A file of `qlm profile`."""
    document = {
        "sources": {"here": {"from": "here", "licence": "ours", "what": "a run"}},
        "profiles": [
            {
                "gpu": "L4",
                "n_gpu": 1,
                "model": "Mistral-7B",
                "evidence": "measured",
                "sources": {"decode": ["here"]},
                **{name: getattr(MEASURED, name) for name in _FIGURES},
            }
        ],
    }
    assert parse_profiles(yaml.safe_dump(document)).hardware == (MEASURED,)
    document["profiles"][0]["colour"] = "red"  # type: ignore[index]
    with pytest.raises(ValueError, match="colour"):
        parse_profiles(yaml.safe_dump(document))


_FIGURES = (
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


def _many(make: Callable[[int], HardwareProfile]) -> ProfileSnapshot:
    return ProfileSnapshot(version=0, made_s=0.0, hardware=tuple(make(number) for number in range(ROWS_MAX + 1)))


def test_an_import_is_bounded() -> None:
    with pytest.raises(ValueError, match=f"at most {ROWS_MAX} hardware rows"):
        importable(_many(lambda number: replace(LEARNED, instance=f"a{number}")))


def test_nothing_learned_is_nothing_to_export() -> None:
    with pytest.raises(ValueError, match="no rows to import"):
        dump_profiles(SHIPPED)
