"""Workload rows: how a class leans on wider ones, in moments and in its whole distribution, and what no row may hold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm.api.v1 import estimator_pb2
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.workload_profile import PREDICTED_SPREAD, WORKLOAD_PRIOR, WorkloadProfile, wider_keys
from qlm_core.statistics.length_curve import BINS
from qlm_core.vocabulary.group import predicted_tokens_of
from qlm_process.wire import profile as profile_wire


def row(slo_class: str, token_class: str, samples: int, length_bin: int) -> WorkloadProfile:
    """A class whose outputs are all of one bin of a single token."""
    return WorkloadProfile(
        model="chat",
        slo_class=slo_class,
        token_class=token_class,
        prompt_tokens_mean=100.0,
        prompt_tokens_variance=0.0,
        output_tokens_mean=length_bin + 1.0,
        output_tokens_variance=0.0,
        samples=samples,
        output_first_bin=length_bin,
        output_shares=(1.0,),
    )


def snapshot(*rows: WorkloadProfile) -> ProfileSnapshot:
    return ProfileSnapshot(version=1, made_s=0.0, hardware=(), workload=rows)


def test_a_class_leans_on_the_nearest_wider_one() -> None:
    assert wider_keys(("chat", "64s", "256/o64")) == [
        ("chat", "", "256/o64"),
        ("chat", "64s", "256"),
        ("chat", "", "256"),
        ("chat", "", ""),
    ]
    assert wider_keys(("chat", "64s", "256")) == [("chat", "", "256"), ("chat", "", "")]
    assert wider_keys(("chat", "", "256")) == [("chat", "", "")]
    assert wider_keys(("chat", "", "")) == []


def test_a_predicted_class_that_nobody_has_seen_counts_as_the_one_without() -> None:
    profiles = snapshot(row("", "", 10**9, 8), row("64s", "256", 10**9, 4))
    assert profiles.workload_for("chat", "64s", "256/o16").output_tokens_mean == pytest.approx(5.0, rel=1e-3)
    assert profiles.output_curve_for("chat", "64s", "256/o16").median_tokens == 5.0
    assert profiles.output_curve_for("chat", "8s", "64").median_tokens == 9.0
    assert profiles.workload_for("code", "64s", "256") == WORKLOAD_PRIOR


@given(st.lists(st.tuples(st.sampled_from(["", "8s"]), st.sampled_from(["", "256", "256/o64"]), st.integers(0, 300), st.integers(0, 15))))
def test_moments_and_distribution_lean_alike(classes: list[tuple[str, str, int, int]]) -> None:
    rows = {(slo, tokens): row(slo, tokens, samples, length) for slo, tokens, samples, length in classes if tokens or not slo}
    profiles = snapshot(*rows.values())
    for slo, tokens in [("8s", "256/o64"), ("8s", "256"), ("", "256"), ("", "")]:
        moments = profiles.workload_for("chat", slo, tokens).output_tokens
        curve = profiles.output_curve_for("chat", slo, tokens).output_tokens
        assert curve.mean == pytest.approx(moments.mean, rel=0.02)
        assert curve.deviation == pytest.approx(moments.deviation, rel=0.05, abs=0.1)


def test_the_rest_is_read_from_the_published_rows() -> None:
    profiles = profile_wire.from_body(profile_wire.to_body(snapshot(row("", "", 10**9, 15))))
    curve = profiles.output_curve_for("chat", "", "")
    assert curve.left(10).mean == pytest.approx(6.0, rel=1e-3)
    assert curve.left(15).mean == pytest.approx(1.0, rel=1e-2)


def test_bytes_of_before_are_read() -> None:
    """A row without the distribution, and a snapshot without a length model."""
    old = estimator_pb2.ProfileSnapshot(
        version=3,
        workload=[
            estimator_pb2.WorkloadProfile(
                model="chat", output_tokens_mean=200.0, output_tokens_variance=100.0, prompt_tokens_mean=10.0, samples=10**9
            )
        ],
    )
    profiles = profile_wire.from_body(old.SerializeToString())
    assert profiles.output_curve_for("chat", "", "").median_tokens == pytest.approx(200.0, rel=0.05)
    assert not profiles.length_model.used_for("chat")


@pytest.mark.parametrize(
    "absurd",
    [
        {"output_shares": (math.nan,)},
        {"output_shares": (-0.1, 1.0)},
        {"output_shares": (0.0,)},
        {"output_shares": (math.inf,)},
        {"output_first_bin": BINS, "output_shares": (1.0,)},
        {"output_first_bin": -1, "output_shares": (1.0,)},
        {"output_shares": (1.0,) * (BINS + 1)},
        {"censored": -1},
        {"output_tokens_mean": math.nan},
        {"output_tokens_mean": 0.0},
    ],
)
def test_absurd_rows_are_refused(absurd: dict[str, object]) -> None:
    fields = {"prompt_tokens_mean": 1.0, "prompt_tokens_variance": 0.0, "output_tokens_mean": 1.0, "output_tokens_variance": 0.0}
    with pytest.raises(ValueError, match="workload profile"):
        WorkloadProfile(**{**fields, **absurd})  # type: ignore[arg-type]


def test_a_class_that_was_predicted_to_be_far_longer_makes_what_was_predicted() -> None:
    """Until its requests have ended, which takes long: the middle between its powers of four."""
    profiles = snapshot(row("", "", 10**9, 8), row("64s", "256", 10**9, 4))
    found = profiles.workload_for("chat", "64s", "256/o4096")
    assert found.output_tokens_mean == pytest.approx(2_560.0)
    assert found.output_tokens.variance == pytest.approx(PREDICTED_SPREAD * 2_560.0**2)
    assert profiles.output_curve_for("chat", "64s", "256/o4096").output_tokens.mean == pytest.approx(2_560.0, rel=0.02)
    means = [
        snapshot(row("", "", 10**9, 8), row("", "256/o4096", samples, 15)).workload_for("chat", "64s", "256/o4096").output_tokens_mean
        for samples in (0, 5, 10**9)
    ]
    assert means == pytest.approx([2_560.0, 1_288.0, 16.0], rel=1e-3)


def test_the_name_of_a_class_states_the_prediction() -> None:
    assert [predicted_tokens_of(name) for name in ("256/o1", "256/o64", "256/o4096")] == [1.0, 40.0, 2_560.0]
    assert [predicted_tokens_of(name) for name in ("", "256", "256/o", "256/o0", "256/ox", "256/o-4", "256/o" + "9" * 400)] == [0.0] * 7
